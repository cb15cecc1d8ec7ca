"""The QoServe benchmark's results for each figure of the paper: one seed, no acceptance lines."""

from collections.abc import Mapping
from math import ceil, inf
from typing import Any

from ops.bench import qoserve_cells as cells
from ops.bench.cells import Cell

Found = Mapping[Cell, Mapping[str, Any]]
Rows = dict[str, dict[str, Any]]
_POLYSERVE_RPS = 50.0
"""Load in requests/s for which QoServe §4.5.2 and Niyama's figure 7a count GPUs."""


def numbered(found: Found, seed: int) -> Rows:
    """Every figure of the paper with data in *found*, with the paper's values."""
    rows: Rows = {}
    for figure in (
        _figure_7, _figure_8, _figure_9, _figures_10_and_11, _figure_13, _figure_14, _figure_15a,
        _figure_15b, _table_6, _other_targets, _niyama_7a,
    ):  # fmt: skip
        rows |= {name: row for name, row in figure(found, seed).items() if row}
    return {name: row | _paper(name) for name, row in rows.items()}


_PAPER: dict[str, str] = {
    "Fig 7": "QoServe 1.5-2.4x of FCFS, 1.2-1.4x of EDF; code: EDF 2.75, QoServe 3.65",
    "Fig 8": "QoServe above both, by less than in figure 7",
    "Fig 9": "tokens up to 2500 while there is slack",
    "Fig 10": "QoServe serves up to 40 % more load at p95",
    "Fig 11": "QoServe without violations up to 30 % above EDF's load",
    "Fig 13": "QoServe: important in time, 3900 at most if relegated; baselines up to 5582",
    "Fig 14": "a higher weight: lower median, more violations among the long",
    "Fig 15a": "goodput 0.26 of Medha, 0.32 of QoServe",
    "Fig 15b": "QoServe always needs fewer GPUs",
    "Table 6, 70-15-15": (
        "FCFS 4835 4844 4826 (100 %), EDF 3354 4215 6034 (98 %), QoServe 0.77 425 1625 (5 %)"
    ),
    "Table 6, 15-15-70": (
        "FCFS 4835 4844 4826 (100 %), EDF 1801 2622 4436 (82.8 %), QoServe 0.78 4.7 1028 (0.5 %)"
    ),
    "§4.4.2": "EDF 3.7, QoServe 5",
    "Niyama Fig 7a": "Niyama needs 13-32 % fewer GPUs",
}


def _paper(name: str) -> dict[str, str]:
    return {"paper": next(text for start, text in _PAPER.items() if name.startswith(start))}


def _row(found: Found, made: Mapping[str, Cell], name: str) -> dict[str, Any]:
    """Value *name* of each measured cell of the cells *made*."""
    return {key: found[cell][name] for key, cell in made.items() if cell in found}


def _figure_7(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for lengths, profile, hours in (
        ("code", "28", 4), ("code", "2x", 4), ("conversation", "28", 2), ("sharegpt", "28", 2)
    ):  # fmt: skip
        made = {
            policy: cells.goodput(profile, policy, seed=seed, hours=hours, lengths=lengths)
            for policy in cells.SHARED
        }
        row = _row(found, made, "goodput_rps")
        rows[f"Fig 7, goodput, {lengths}, {profile}, {hours} h, 1/s"] = row
        if len(row) == len(made):
            fcfs, edf, ours = row.values()
            row |= {"ours / FCFS": ours / fcfs, "ours / EDF": ours / edf}
    return rows


def _figure_8(found: Found, seed: int) -> Rows:
    made = {p: cells.prefill_goodput(p, seed=seed) for p in cells.PREFILL_POLICIES}
    return {"Fig 8, prefill only, conversation, 1/s": _row(found, made, "goodput_rps")}


def _figure_9(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for policy in cells.CHUNK_POLICIES:
        figures = found.get(cells.iterations(policy, seed=seed))
        if figures is None:
            continue
        title = f"Fig 9, {policy}, conversation at 4.5/s"
        shares = figures["quantiles"]
        rows[f"{title}, tokens an iteration"] = _by_share(shares, figures["tokens"])
        milliseconds = [1000 * value for value in figures["duration_s"]]
        rows[f"{title}, ms an iteration"] = _by_share(shares, milliseconds)
    return rows


def _by_share(shares: list[float], values: list[float]) -> dict[str, float]:
    return {
        f"p{100 * share:.0f}": round(value, 1) for share, value in zip(shares, values, strict=True)
    }


def _figures_10_and_11(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for policy in cells.LOAD_POLICIES:
        for rate in cells.LOADS_RPS:
            figures = found.get(cells.load(policy, rate, seed=seed))
            if figures is None:
                continue
            classes = figures["classes"]
            rows.setdefault(f"Fig 10, p50/p95 s of Q1 Q2 Q3, {policy}", {})[f"{rate:g}/s"] = (
                " ".join(_pair(part["latency_s"]) for part in classes.values())
            )
            shares = [figures[f"{name}violations"] for name in ("", "long_", "short_")]
            shares += [part["violations"] for part in classes.values()]
            rows.setdefault(f"Fig 11, % missed: all, long, short, Q1 Q2 Q3, {policy}", {})[
                f"{rate:g}/s"
            ] = " ".join(f"{100 * share:.1f}" for share in shares)
    return rows


def _figure_13(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for high in cells.WAVE_HIGHS_RPS:
        for policy in cells.WAVE_POLICIES:
            figures = found.get(cells.wave(policy, high, seed=seed))
            if figures is None:
                continue
            rows[f"Fig 13, rolling p99 of important, s, 2<->{high:g}, {policy}"] = {
                name: f"median {_seconds(part['median'])} max {_seconds(part['max'])}"
                for name, part in figures["rolling_p99_s"].items()
            }
    return rows


def _figure_14(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for alpha, policy in cells.ALPHAS.items():
        row = rows.setdefault(f"Fig 14, {alpha} ms/token: median s, % missed, % of long", {})
        for rate in cells.ALPHA_LOADS_RPS:
            figures = found.get(cells.load(policy, rate, seed=seed))
            if figures is not None:
                row[f"{rate:g}/s"] = (
                    f"{_seconds(figures['latency_s']['p50'])} {100 * figures['violations']:.1f} "
                    f"{100 * figures['long_violations']:.0f}"
                )
    return rows


def _figure_15a(found: Found, seed: int) -> Rows:
    made = {policy: cells.long_goodput(policy, seed=seed) for policy in cells.LONG_POLICIES}
    rows: Rows = {"Fig 15a, 10,000 tokens of prompt, 1/s": _row(found, made, "goodput_rps")}
    for policy in cells.LONG_POLICIES:
        figures = found.get(cells.long_iterations(policy, seed=seed))
        if figures is not None:
            rows[f"Fig 15a, {policy}, prefill tokens an iteration"] = _by_share(
                figures["quantiles"], figures["prefill_tokens"]
            )
    return rows


def _figure_15b(found: Found, seed: int) -> Rows:
    bins = {name: cells.polyserve(name, seed=seed) for name in ("Q1", "Q2")}
    ours = {share: cells.two_tbt(share, seed=seed) for share in cells.TBT_SHARES}
    if not all(cell in found for cell in (*bins.values(), *ours.values())):
        return {}
    fast_rps, slow_rps = (found[cell]["goodput_rps"] for cell in bins.values())
    row = {}
    for share, cell in ours.items():
        fast = num_gpus(share * _POLYSERVE_RPS, fast_rps)
        slow = num_gpus((1 - share) * _POLYSERVE_RPS, slow_rps)
        shared = num_gpus(_POLYSERVE_RPS, found[cell]["goodput_rps"])
        row[f"{100 * share:.0f} % at 50 ms"] = f"PolyServe {fast}+{slow}, ours {shared}"
    return {"Fig 15b, GPUs for 50/s of conversation": row}


def _table_6(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for shares in cells.SHARES:
        for profile in cells.PROFILES:
            row = rows.setdefault(f"Table 6, {shares} at 4.5/s, {profile}, median s Q1 Q2 Q3", {})
            for policy in (*cells.BASELINES, "qoserve", "qoserve+curve"):
                figures = found.get(cells.mix(profile, policy, shares, seed=seed))
                if figures is not None:
                    medians = [c["latency_s"]["p50"] for c in figures["classes"].values()]
                    row[policy] = (
                        " ".join(map(_seconds, medians)) + f" ({100 * figures['violations']:.1f} %)"
                    )
    return rows


def _other_targets(found: Found, seed: int) -> Rows:
    made = {policy: cells.tight(policy, seed=seed) for policy in cells.TIGHT_POLICIES}
    return {"§4.4.2, targets 3 s, 6 s, 1000 s, conversation, 1/s": _row(found, made, "goodput_rps")}


def _niyama_7a(found: Found, seed: int) -> Rows:
    row = {}
    for lengths in cells.MIXES:
        silo = [cells.silo_goodput(name, lengths, seed=seed) for name in cells.SILO_CHUNKS]
        shared = cells.niyama_goodput(lengths, "qoserve+curve", seed=seed)
        if not all(cell in found for cell in (*silo, shared)):
            continue
        parts = [num_gpus(_POLYSERVE_RPS / 3, found[cell]["goodput_rps"]) for cell in silo]
        ours = num_gpus(_POLYSERVE_RPS, found[shared]["goodput_rps"])
        fewer = 1 - ours / sum(parts)
        row[lengths] = f"silo {'+'.join(map(str, parts))}, ours {ours} ({100 * fewer:.0f} % fewer)"
    return {"Niyama Fig 7a, GPUs for 50/s": row}


def num_gpus(rate_rps: float, per_replica_rps: float) -> float:
    """Number of replicas for a load; infinite if a replica has no capacity."""
    return ceil(rate_rps / per_replica_rps) if per_replica_rps > 0 else inf


def _pair(quantiles: Mapping[str, float | None]) -> str:
    return f"{_seconds(quantiles['p50'])}/{_seconds(quantiles['p95'])}"


def _seconds(value: float | None) -> str:
    """
    Seconds as text with three digits; an infinite latency means requests that were not served.
    """
    return "endless" if value is None else f"{value:.3g}"
