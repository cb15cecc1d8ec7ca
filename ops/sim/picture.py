"""Picture of a simulation: misses over time, latencies and targets, load and capacity."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from ops.sim.cluster import Outcome
from ops.sim.request import SimRequest
from solver.scheduling.engine.latency import LatencyTable

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

_BINS = 48
_LARGEST_CHUNK_TOKENS = 4096


def capacity_tokens_per_s(latency: LatencyTable, num_replicas: int) -> float:
    """
    Prefill tokens per second of all replicas with the best chunk, without attention and decodes.
    """
    largest = min(_LARGEST_CHUNK_TOKENS, latency.max_tokens)
    best = max(n / latency.predict_s(n, 0, 0) for n in range(64, largest + 1, 64))
    return num_replicas * best


def draw(outcome: Outcome, file: Path, *, title: str, capacity: float) -> None:
    """
    Write the picture of *outcome* to *file*, in the format of its suffix.

    Args:
        outcome: Outcome with at least one request.
        file: File in an existing directory.
        title: Title of the whole picture.
        capacity: Tokens per second that all replicas can prefill.
    """
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    figure.suptitle(title)
    requests = outcome.requests
    classes = sorted({r.arrival.class_name for r in requests})
    members = {name: [r for r in requests if r.arrival.class_name == name] for name in classes}
    colors = {name: f"C{number}" for number, name in enumerate(classes)}
    _misses(axes[0, 0], members, colors)
    _load(axes[0, 1], requests, capacity)
    interactive = {name: m for name, m in members.items() if m[0].interactive}
    whole = {name: m for name, m in members.items() if not m[0].interactive}
    _latencies(axes[1, 0], interactive, colors, "time to first token (TTFT)")
    _latencies(axes[1, 1], whole, colors, "time to last token (TTLT)")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _misses(axes: Axes, members: dict[str, list[SimRequest]], colors: dict[str, str]) -> None:
    last = max(r.arrival.arrived_at for group in members.values() for r in group)
    edges = np.linspace(0.0, last + 1e-6, _BINS + 1)
    for name, group in members.items():
        arrived = [r.arrival.arrived_at for r in group]
        missed = [float(r.violated) for r in group]
        totals, _ = np.histogram(arrived, bins=edges)
        counts, _ = np.histogram(arrived, bins=edges, weights=missed)
        share = 100 * counts / np.maximum(1, totals)
        label = f"{name}: {100 * sum(missed) / len(group):.2f} %"
        axes.step(edges[:-1] / 60, share, where="post", color=colors[name], label=label)
    axes.set(xlabel="arrival, min", ylabel="missed, %", title="misses by class")
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.legend()
    axes.grid(alpha=0.3)


def _load(axes: Axes, requests: Sequence[SimRequest], capacity: float) -> None:
    arrived = np.array([r.arrival.arrived_at for r in requests])
    edges = np.linspace(0.0, arrived.max() + 1e-6, _BINS + 1)
    prompts = [float(r.arrival.prompt_tokens) for r in requests]
    offered, _ = np.histogram(arrived, bins=edges, weights=prompts)
    width_s = edges[1] - edges[0]
    axes.step(edges[:-1] / 60, offered / width_s, where="post", color="C3", label="offered")
    axes.axhline(capacity, color="black", linestyle=":", label="capacity at the best chunk")
    axes.set(
        xlabel="arrival, min", ylabel="prompt tokens/s", title="load and capacity", ylim=(0, None)
    )
    axes.legend()
    axes.grid(alpha=0.3)


def _latencies(
    axes: Axes, members: dict[str, list[SimRequest]], colors: dict[str, str], title: str
) -> None:
    for name, group in members.items():
        used = np.sort([value for r in group if (value := _latency_s(r)) is not None])
        shares = np.arange(1, len(used) + 1) / len(group)
        axes.plot(used, shares, color=colors[name], label=name)
        for target_s in {r.deadline_at - r.arrival.arrived_at for r in group[:1]}:
            if target_s != float("inf"):
                axes.axvline(
                    target_s, color=colors[name], linestyle=":", label=f"{name}: {target_s:g} s"
                )
    axes.set(xlabel="s", ylabel="share of requests", title=title, ylim=(0, 1.02))
    if members:
        axes.set_xscale("log")
        axes.legend(loc="upper left")
    else:
        axes.text(0.5, 0.5, "no such traffic", ha="center", transform=axes.transAxes)
    axes.grid(alpha=0.3)


def _latency_s(request: SimRequest) -> float | None:
    """TTFT of an interactive request, TTLT of other requests; None if this token is missing."""
    done_at = request.first_token_at if request.interactive else request.finished_at
    return None if done_at is None else max(1e-3, done_at - request.arrival.arrived_at)
