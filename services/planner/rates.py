"""What the leader knows of how fast instances serve, from the profiles of the estimator."""

from collections.abc import Mapping, Sequence

from services.planner.state import LeaderState
from shared.contracts.base import ModelName, Seconds
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.lanes import model_of
from shared.contracts.telemetry import InstanceStatus
from solver.planning.building import DEFAULT_RATE_ERROR, ServiceRates
from solver.planning.grouping import Spread
from solver.prediction.latency_model import predict_batch_s
from solver.prediction.service_time import ALL_APPLICATIONS, capped

Rates = Mapping[tuple[str, ModelName], ServiceRates]
"""By device and model."""
PRIOR_PROMPT, PRIOR_OUTPUT = Spread(192.0, 192.0), Spread(64.0, 64.0)
"""Tokens of a request in a lane of which nothing is known."""
PRIOR_RATE_PER_S = 500.0
MIN_RATE_ERROR, MAX_RATE_ERROR = 0.02, 0.5
LARGEST_ITERATION_TOKENS = 2048


def device_of(status: InstanceStatus) -> str:
    return f"{status.engine} {status.device}"


def rates_of(state: LeaderState, statuses: Sequence[InstanceStatus]) -> Rates:
    """By device and model; instances of one device are taken to be alike."""
    mixes = mixes_of(state)
    rates: dict[tuple[str, ModelName], ServiceRates] = {}
    for status in statuses:
        device = device_of(status)
        for entry in status.models:
            model = ModelName(entry.model)
            if (device, model) not in rates:
                profile = state.profiles.get((model, status.engine, status.device))
                mix = mixes.get(model, (PRIOR_PROMPT.mean, PRIOR_OUTPUT.mean))
                rates[device, model] = _rates(profile, status, mix)
    return rates


def mixes_of(state: LeaderState) -> dict[ModelName, tuple[float, float]]:
    """Mean prompt and expected output tokens of what has come, by model."""
    sums: dict[ModelName, list[int]] = {}
    for observed in state.lanes.values():
        for total in observed.lanes:
            model = model_of(total.lane)
            if model is not None and total.requests:
                of_model = sums.setdefault(model, [0, 0, 0])
                for place, value in enumerate(
                    (total.requests, total.prompt_tokens, total.max_tokens)
                ):
                    of_model[place] += value
    return {
        model: (prompt / requests, output_tokens(state, model, allowed / requests).mean)
        for model, (requests, prompt, allowed) in sums.items()
    }


def _rates(
    profile: Profile | None, status: InstanceStatus, mix: tuple[float, float]
) -> ServiceRates:
    """What the estimator has published of a model on this kind of device; else priors."""
    if profile is None:
        return ServiceRates(token_rate_per_s=PRIOR_RATE_PER_S)
    prefill, error = profile.prefill_s, profile.latency_error
    rate_per_s, decode_s = profile.token_rate_per_s or PRIOR_RATE_PER_S, 0.0
    if profile.latency is not None:
        rate_per_s, decode_s = _in_full_batches(profile.latency, status, mix)
    return ServiceRates(
        token_rate_per_s=rate_per_s,
        rate_error=DEFAULT_RATE_ERROR
        if error is None
        else min(MAX_RATE_ERROR, max(MIN_RATE_ERROR, error)),
        prefill_s=Spread(prefill.mean, prefill.sd) if prefill else Spread(0.0),
        decode_s_per_token=decode_s,
    )


def _in_full_batches(
    latency: LatencyCoefficients, status: InstanceStatus, mix: tuple[float, float]
) -> tuple[float, Seconds]:
    """
    Tokens per second, and seconds per decoded token, while as many run as fit.

    Args:
        latency: Of an iteration.
        status: Of the instance, which says how many fit.
        mix: Mean prompt and output tokens of a request.

    Source: QLM §6: profiled with a full batch.
    A prompt's token attends to half of its prompt, on average.

    Differs: computed from the latency model. What an instance has served lately is less than
        that when it had little to do, and a plan would take it for slow.
    """
    prompt, output = mix
    batch = batch_of(status, prompt + output)
    context_tokens = batch * (prompt + output / 2)
    # Each decode gets its token, and prompts as many as keep the batch full.
    tokens = min(batch * (prompt + output) / max(1.0, output), LARGEST_ITERATION_TOKENS)
    duration_s, decode_s = (
        predict_batch_s(
            latency,
            compute_tokens=batch + prefilled,
            context_tokens=context_tokens,
            prefill_pairs=prefilled * prompt / 2,
        )
        for prefilled in (max(0.0, tokens - batch), 0.0)
    )
    return (tokens / duration_s if duration_s > 0 else PRIOR_RATE_PER_S), decode_s


def batch_of(status: InstanceStatus, tokens: float) -> float:
    """Requests of so many *tokens* that an instance computes at once while more wait."""
    return min(float(status.max_running), max(1.0, status.kv_capacity_tokens / tokens))


def output_tokens(state: LeaderState, model: ModelName, allowed: float) -> Spread:
    """What answers of *model* have had, at most what these may have."""
    for (of, _, _), profile in sorted(state.profiles.items()):
        lengths = profile.output_tokens.get(ALL_APPLICATIONS)
        if of == model and lengths is not None:
            possible = capped(lengths, limit_tokens=allowed)
            return Spread(possible.mean, possible.sd)
    return Spread(allowed)
