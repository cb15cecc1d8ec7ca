"""
Errors of the latency model on unseen iterations, compared with QoServe's random forest.

The two models learn from the first 60 % of an engine's iterations and are judged on the later 40 %.

- Simulated engines with the shipped profiles: predictions are judged against the profile's
  times; training times have noise with a relative standard deviation of a tenth. The judgement is
  repeated with a fifth of the training iterations disturbed.
- vLLM with a small model on this machine's CPU: predictions are judged against measured times,
  including disturbed ones, unless the engine had to wait for a CPU. Models are fitted and judged
  separately for each of three loads, and the median counts, because the speed of a shared
  processor varies.

Chunks are judged where an iteration has one prefill: the largest chunk that a model allows in a
time budget is compared with the largest chunk that fits. In simulation, the budget is the time
of a uniformly drawn chunk; on vLLM, it is the measured time of the iteration with its noise.
"""

from collections.abc import Sequence

import numpy as np

from ops.baselines.prediction.iteration_forest import Decodes
from ops.baselines.prediction.iteration_forest_fit import LEAST_SAMPLES
from ops.bench.latency_fits import LARGEST_CHUNK, Fits, Floats
from ops.bench.latency_steps import Step, disturbed, simulated_steps
from ops.bench.latency_vllm import Measured, vllm_steps
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.sim.profiles import ALIASES, load
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.base import Seconds
from shared.contracts.telemetry import EngineIteration
from solver.prediction.latency.latency_model import predict_s
from solver.scheduling.engine.latency import LatencyTable

SIMULATED_MOST = 0.04
VLLM_MEDIAN_MOST, VLLM_P95_MOST = 0.10, 0.30
MOVED_MOST = 0.05
CHUNK_MOST = 0.10
KNOWN_SHARE = 0.6
DISTURBED_SHARE = 0.2
MOST_WAITING = 0.05
"""Largest share of time that vLLM may wait for a CPU; above it, other load determines times."""
LOADS, LOAD_S = 3, 40.0
"""Number of loads on vLLM, and duration of each load in seconds."""
LEAST_CHUNK = 32
_CHUNKS = 200
"""Number of chunks of each engine for which predictions are compared."""


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """Run the benchmark with simulated engines first, then with vLLM if it is installed."""
    result = Result(name="latency_model", seed=seed, quick=quick)
    duration_s = 120.0 if quick else 600.0
    wrong = [_simulated(result, alias, seed, duration_s=duration_s) for alias in ALIASES]
    result.lines += _chunk_lines(np.concatenate(wrong))
    reason = vllm_unavailable_reason()
    if reason is not None:
        say(f"vLLM is not measured: {reason}")
    measured: Sequence[Measured] = ()
    if reason is None:
        loads, load_s = (1, 15.0) if quick else (LOADS, LOAD_S)
        measured = await vllm_steps(seed=seed, loads=loads, duration_s=load_s)
    _on_vllm(result, measured, seed)
    return result


def _simulated(result: Result, alias: str, seed: int, *, duration_s: Seconds) -> Floats:
    """
    Add figures and acceptance lines of one latency profile; return relative errors of the forest's
    chunks.
    """
    profile = load(alias)
    device = "H100-80GB" if alias == "h100" else "A100-80GB"
    steps = simulated_steps(profile, device, seed=seed, duration_s=duration_s)
    split = int(KNOWN_SHARE * len(steps))
    known, later = [each.iteration for each in steps[:split]], steps[split:]
    fits = Fits.of(known, seed)
    asked = [each.iteration for each in later]
    exact_s = np.array([each.exact_s for each in later])
    measured_s = np.array([each.duration_s for each in asked])
    predicted_s = fits.predicted_s(asked)
    has_prefill = np.array([each.compute_tokens > each.num_decodes for each in asked])
    result.figures[f"{profile.name}: iterations"] = {"known": split, "judged": len(later)}
    for model, times_s in predicted_s.items():
        errors = times_s / exact_s - 1
        result.figures[f"{profile.name}: {model}"] = {
            **_shares(errors),
            "median with a prefill": float(np.median(np.abs(errors[has_prefill]))),
            "median of noisy times": float(np.median(np.abs(times_s / measured_s - 1))),
        }
    twice = Fits.of(disturbed(known, share=DISTURBED_SHARE, seed=seed), seed)
    moved = np.abs(twice.predicted_s(asked)["terms"] / predicted_s["terms"] - 1)
    result.figures[f"{profile.name}: 2048 tokens, ms"] = _conserves_example(fits, profile.latency)
    wrong = _simulated_chunks(fits, later, profile.latency, np.random.default_rng(seed))
    _report_chunks(result, profile.name, wrong)
    terms_error = float(np.median(np.abs(predicted_s["terms"] / exact_s - 1)))
    result.lines += [
        Line(name=f"{profile.name}: median error", value=terms_error, bound=SIMULATED_MOST),
        Line(
            name=f"{profile.name}: moved by a fifth of disturbed iterations, p95",
            value=float(np.quantile(moved, 0.95)),
            bound=MOVED_MOST,
        ),
    ]
    return wrong["forest"]


def _conserves_example(fits: Fits, latency: LatencyTable) -> dict[str, float]:
    """
    Times of a chunk without context and of a chunk after 40,000 tokens (ConServe §4.2).

    The two chunks are far outside the training data.
    """
    figures: dict[str, float] = {}
    for name, before in (("new", 0), ("behind 40000", 40_000)):
        exact_s = latency.predict_s(2048, 2048 * (before + 1024), before)
        found_s = predict_s(fits.terms, compute_tokens=2048, context_tokens=before)
        figures |= {f"{name}, exact": 1000 * exact_s, f"{name}, terms": 1000 * found_s}
    return figures


def _on_vllm(result: Result, measured: Sequence[Measured], seed: int) -> None:
    """
    Add acceptance lines of the loads in which vLLM hardly waited for a CPU and ran enough
    iterations.
    """
    judged: list[dict[str, float]] = []
    for number, each in enumerate(measured, 1):
        if not _is_enough(each):
            continue
        terms = _report_measured(result, f"vLLM, load {number}", each, seed)
        if each.waiting_share <= MOST_WAITING:
            judged.append(terms)
        else:
            say(
                f"vLLM is not judged: its engine waited {each.waiting_share:.0%} of the time "
                f"for a CPU; the limit is {MOST_WAITING:.0%}"
            )
    result.lines += [
        Line(
            name=f"vLLM: {share} error",
            value=float(np.median([each[share] for each in judged])) if judged else None,
            bound=bound,
        )
        for share, bound in (("median", VLLM_MEDIAN_MOST), ("p95", VLLM_P95_MOST))
    ]


def _is_enough(measured: Measured) -> bool:
    count = len(measured.iterations)
    if KNOWN_SHARE * count < LEAST_SAMPLES + 1:
        say(f"vLLM is not judged: {count} iterations are too few")
        return False
    return True


def _report_measured(result: Result, name: str, measured: Measured, seed: int) -> dict[str, float]:
    """Add the figures of one load; return relative errors of the latency model's terms."""
    steps = measured.iterations
    split = int(KNOWN_SHARE * len(steps))
    fits, later = Fits.of(steps[:split], seed), steps[split:]
    measured_s = np.array([each.duration_s for each in later])
    has_prefill = np.array([each.compute_tokens > each.num_decodes for each in later])
    result.figures[f"{name}: iterations"] = {"known": split, "judged": len(later)}
    result.figures[f"{name}: engine waited for a CPU, share"] = measured.waiting_share
    result.figures[f"{name}: median ms"] = 1000 * float(np.median(measured_s))
    predicted_s = fits.predicted_s(later)
    for model, times_s in predicted_s.items():
        errors = times_s / measured_s - 1
        result.figures[f"{name}: {model}"] = {
            **_shares(errors),
            "median with a prefill": _median_or_none(np.abs(errors[has_prefill])),
        }
    _report_chunks(result, name, _measured_chunks(fits, later))
    return _shares(predicted_s["terms"] / measured_s - 1)


def _simulated_chunks(
    fits: Fits, steps: Sequence[Step], latency: LatencyTable, random: np.random.Generator
) -> dict[str, Floats]:
    """
    Relative errors of chunks by model, compared with the largest chunk that fits by the latency
    profile.
    """
    wrong: dict[str, list[float]] = {"terms": [], "forest": []}
    with_one = [(each.iteration, each.chunk) for each in steps if each.chunk is not None]
    for iteration, (_, before) in with_one[:: max(1, len(with_one) // _CHUNKS)]:
        beside = Decodes(iteration.num_decodes, iteration.context_tokens)
        chunk_s = _times_of_chunks(latency, beside, before)
        most = min(LARGEST_CHUNK, fits.forest.most_tokens - beside.num_decodes)
        budget_s = float(chunk_s[int(random.integers(LEAST_CHUNK, most))])
        best = min(most, int(np.searchsorted(chunk_s, budget_s, side="right")))
        for model, chunk in fits.chunks(budget_s, beside, before).items():
            wrong[model].append(chunk / best - 1)
    return {model: np.array(errors) for model, errors in wrong.items()}


def _times_of_chunks(latency: LatencyTable, beside: Decodes, before: int) -> Floats:
    """Exact times of chunks of 1, 2, ... tokens, float64[LARGEST_CHUNK], never falling."""
    return np.array(
        [
            latency.predict_s(
                beside.num_decodes + tokens, tokens * (before + tokens / 2), beside.context_tokens
            )
            for tokens in range(1, LARGEST_CHUNK + 1)
        ]
    )


def _measured_chunks(fits: Fits, steps: Sequence[EngineIteration]) -> dict[str, Floats]:
    """Relative errors of the chunks that models allow in an iteration's measured time."""
    wrong: dict[str, list[float]] = {"terms": [], "forest": []}
    for each in steps:
        chunk = each.compute_tokens - each.num_decodes
        if LEAST_CHUNK <= chunk <= LARGEST_CHUNK:
            beside = Decodes(each.num_decodes, each.context_tokens)
            # Context of the iteration's prefill; several prefills count as one
            # with equally many pairs of tokens.
            before = max(0.0, each.prefill_pairs / chunk - chunk / 2)
            for model, allowed in fits.chunks(each.duration_s, beside, before).items():
                wrong[model].append(allowed / chunk - 1)
    return {model: np.array(errors) for model, errors in wrong.items()}


def _report_chunks(result: Result, name: str, wrong: dict[str, Floats]) -> None:
    for model, errors in wrong.items():
        if len(errors):
            result.figures[f"{name}: chunks of {model}"] = {
                "judged": len(errors),
                **_shares(errors),
                "too large by over a tenth": float(np.mean(errors > CHUNK_MOST)),
            }


def _chunk_lines(wrong: Floats) -> list[Line]:
    """
    Acceptance lines of the forest over all latency profiles: absolute error, and errors below 0.
    """
    return [
        Line(
            name="forest, median chunk error, all profiles",
            value=float(np.median(np.abs(wrong))),
            bound=CHUNK_MOST,
        ),
        Line(
            name="forest, median signed chunk error, all profiles",
            value=float(np.median(wrong)),
            bound=0.0,
        ),
    ]


def _shares(errors: Floats) -> dict[str, float]:
    median, p95 = np.quantile(np.abs(errors), (0.5, 0.95))
    return {"median": float(median), "p95": float(p95), "bias": float(np.median(errors))}


def _median_or_none(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) else None
