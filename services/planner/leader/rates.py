"""Service rates of instances, which the leader takes from the estimator's profiles."""

import math
from collections.abc import Mapping, Sequence

from services.planner.state import LeaderState
from shared.contracts.base import ModelName
from shared.contracts.estimates import Profile
from shared.contracts.lanes import model_of
from shared.contracts.telemetry import InstanceStatus
from solver.planning.problem.grouping import Spread
from solver.planning.problem.snapshot import DEFAULT_RATE_ERROR, ServiceRates
from solver.prediction.latency.full_batch import batch_size, full_batch
from solver.prediction.latency.service_time import ALL_APPLICATIONS, capped

Rates = Mapping[tuple[str, ModelName], ServiceRates]
"""Service rates by device and model."""
PRIOR_PROMPT, PRIOR_OUTPUT = Spread(192.0, 192.0), Spread(64.0, 64.0)
"""Prompt and output tokens of a request in a lane without data."""
PRIOR_RATE_PER_S = 500.0
MIN_RATE_ERROR, MAX_RATE_ERROR = 0.02, 0.5


def device_of(status: InstanceStatus) -> str:
    return f"{status.engine} {status.device}"


def rates_of(state: LeaderState, statuses: Sequence[InstanceStatus]) -> Rates:
    """Rates by device and model; all instances of one device are assumed to be equal."""
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
    """Mean prompt tokens and mean expected output tokens of arrived requests, by model."""
    sums: dict[ModelName, list[int]] = {}
    for observed in state.lanes.values():
        for total in observed.lanes:
            model = model_of(total.lane)
            if model is not None and total.requests:
                of_model = sums.setdefault(model, [0, 0, 0])
                for place, value in enumerate(
                    (total.requests, total.prompt_tokens, total.expected_tokens)
                ):
                    of_model[place] += value
    return {
        model: (prompt / requests, output_tokens(state, model, allowed / requests).mean)
        for model, (requests, prompt, allowed) in sums.items()
    }


def _rates(
    profile: Profile | None, status: InstanceStatus, mix: tuple[float, float]
) -> ServiceRates:
    """
    Service rates of a model on the device of *status* from the profile; prior rates without a
    profile.
    """
    if profile is None:
        return ServiceRates(token_rate_per_s=PRIOR_RATE_PER_S)
    prefill, error = profile.prefill_s, profile.latency_error
    rate_per_s, decode_s = profile.token_rate_per_s or PRIOR_RATE_PER_S, 0.0
    if profile.latency is not None:
        prompt, output = mix
        full = full_batch(
            profile.latency, batch=batch_of(status, prompt + output), prompt=prompt, output=output
        )
        rate_per_s, decode_s = full.token_rate_per_s or PRIOR_RATE_PER_S, full.decode_s_per_token
    return ServiceRates(
        token_rate_per_s=rate_per_s,
        rate_error=DEFAULT_RATE_ERROR
        if error is None
        else min(MAX_RATE_ERROR, max(MIN_RATE_ERROR, error)),
        prefill_s=Spread(prefill.mean, prefill.sd) if prefill else Spread(0.0),
        decode_s_per_token=decode_s,
        is_measured=bool(profile.token_rate_per_s),
    )


def batch_of(status: InstanceStatus, tokens: float) -> float:
    """
    Number of requests of *tokens* tokens that a loaded instance computes concurrently; an unknown
    KV capacity counts as unbounded.
    """
    return batch_size(status.max_running, status.kv_capacity_tokens or math.inf, tokens)


def output_tokens(state: LeaderState, model: ModelName, allowed: float) -> Spread:
    """Observed answer lengths of *model*, capped at *allowed*."""
    for (of, _, _), profile in sorted(state.profiles.items()):
        lengths = profile.output_tokens.get(ALL_APPLICATIONS)
        if of == model and lengths is not None:
            possible = capped(lengths, limit_tokens=allowed)
            return Spread(possible.mean, possible.sd)
    return Spread(allowed)
