"""Workloads: arrival times, lengths and targets of requests."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from ops.sim.lengths import TARGETS, LengthMix, MixedTraffic, power_mapped
from ops.sim.request import Arrival
from shared.contracts.base import Seconds
from shared.contracts.qos import Importance, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """Class of requests: a share of the traffic with one SLO."""

    name: str
    slo: Slo
    share: float


Q1 = TrafficClass(name="Q1", slo=Slo(ttft_s=6, tbt_s=0.05), share=1 / 3)
Q2 = TrafficClass(name="Q2", slo=Slo(ttlt_s=600), share=1 / 3)
Q3 = TrafficClass(name="Q3", slo=Slo(ttlt_s=1800), share=1 / 3)
CLASSES = (Q1, Q2, Q3)
"""Classes of requests in QoServe's table 3."""


def with_shares(shares: Sequence[float]) -> tuple[TrafficClass, ...]:
    """Copy of `CLASSES` with the shares *shares*."""
    total = sum(shares)
    return tuple(
        TrafficClass(name=c.name, slo=c.slo, share=share / total)
        for c, share in zip(CLASSES, shares, strict=True)
    )


def build(
    random: np.random.Generator,
    *,
    arrived_at: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    classes: Sequence[TrafficClass] = CLASSES,
    low_share: float = 0.0,
) -> list[Arrival]:
    """
    Assign a random class to each arrival, and importance `low` to *low_share* of each class.

    Returns:
        Requests in order of arrival.
    """
    chosen = random.choice(len(classes), size=len(arrived_at), p=[c.share for c in classes])
    low = random.random(len(arrived_at)) < low_share
    return [
        Arrival(
            arrived_at=at,
            prompt_tokens=prompt,
            output_tokens=output,
            class_name=classes[int(index)].name,
            slo=classes[int(index)].slo,
            importance=Importance.LOW if is_low else Importance.HIGH,
        )
        for at, prompt, output, index, is_low in zip(
            arrived_at, prompts, outputs, chosen, low, strict=True
        )
    ]


def synthetic(
    random: np.random.Generator,
    *,
    arrived_at: Sequence[float],
    lengths: LengthMix | MixedTraffic,
    classes: Sequence[TrafficClass] = CLASSES,
    low_share: float = 0.0,
) -> list[Arrival]:
    """A workload with request lengths drawn from *lengths*."""
    prompts, outputs = lengths.draw(random, len(arrived_at))
    return build(
        random,
        arrived_at=arrived_at,
        prompts=prompts,
        outputs=outputs,
        classes=classes,
        low_share=low_share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Rows of a trace in the format of the Azure LLM inference traces."""

    arrived_at: tuple[Seconds, ...]
    """Arrival time in seconds since the first row."""
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


def read_trace(file: Path, *, match: str | None = None) -> Trace:
    """
    Read `TIMESTAMP,ContextTokens,GeneratedTokens` rows.

    Args:
        file: Azure LLM inference trace, CSV.
        match: Key of `lengths.TARGETS`: the percentiles to which the lengths are mapped.

    Raises:
        ValueError: A column is missing, a row is unreadable, or there are no rows.
    """
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = list(csv.DictReader(lines))
    try:
        times = [_seconds(row["TIMESTAMP"]) for row in rows]
        prompts = [max(1, int(row["ContextTokens"])) for row in rows]
        outputs = [max(1, int(row["GeneratedTokens"])) for row in rows]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: expected columns TIMESTAMP, ContextTokens, GeneratedTokens"
        ) from error
    if not rows:
        raise ValueError(f"{file}: no rows")
    if match is not None:
        p50, p90, out50, out90 = TARGETS[match]
        prompts = power_mapped(prompts, p50, p90)
        outputs = power_mapped(outputs, out50, out90)
    start = min(times)
    order = sorted(range(len(times)), key=times.__getitem__)
    return Trace(
        arrived_at=tuple(times[i] - start for i in order),
        prompts=tuple(prompts[i] for i in order),
        outputs=tuple(outputs[i] for i in order),
    )


def _seconds(text: str) -> float:
    """
    Seconds of a timestamp; accepts fractions that `fromisoformat` of Python 3.11 rejects.
    """
    whole, _, fraction = text.strip().partition(".")
    digits = "".join(c for c in fraction if c.isdigit())
    return datetime.fromisoformat(whole).timestamp() + (float(f"0.{digits}") if digits else 0.0)


def resampled(
    random: np.random.Generator,
    trace: Trace,
    *,
    arrived_at: Sequence[float],
    classes: Sequence[TrafficClass] = CLASSES,
    low_share: float = 0.0,
) -> list[Arrival]:
    """
    A workload that arrives at the times *arrived_at*; pairs of lengths are drawn from the trace
    with replacement.
    """
    rows = random.integers(0, len(trace.prompts), size=len(arrived_at))
    return build(
        random,
        arrived_at=arrived_at,
        prompts=[trace.prompts[int(i)] for i in rows],
        outputs=[trace.outputs[int(i)] for i in rows],
        classes=classes,
        low_share=low_share,
    )
