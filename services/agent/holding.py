"""
Work that an instance has pulled but not begun, in seconds and tokens, and the bounds of this work.
"""

import math
from dataclasses import replace
from statistics import fmean

from services.agent.backends.base import EngineSnapshot
from services.agent.state import AgentState
from shared.contracts.base import Seconds
from shared.contracts.estimates import Profile
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import PullState
from solver.prediction import backlog
from solver.prediction.latency.full_batch import batch_size, full_batch
from solver.prediction.latency.service_time import (
    predicted_output_tokens,
    predicted_prefill_s,
    tokens_s,
)
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import rank_of
from solver.scheduling.pull_room import Held, PullBounds, counted_s, has_room, work_s
from solver.scheduling.window import tokens_needed


def held_now(state: AgentState, engine: EngineSnapshot, bounds: PullBounds) -> Held:
    """Pulled work that has not begun, and the delay that the work causes for one more request."""
    regular: list[QueuedRequest] = []
    best_effort: list[QueuedRequest] = []
    for request in state.not_begun():
        (regular if rank_of(request) is Rank.REGULAR else best_effort).append(request)
    return Held(
        num_regular=len(regular),
        num_best_effort=len(best_effort),
        num_pulling=state.pulling,
        regular_s=_work_s(state, regular, engine, bounds),
        best_effort_s=_work_s(state, best_effort, engine, bounds),
        regular_tokens=sum(tokens_needed(request) for request in regular),
        best_effort_tokens=sum(tokens_needed(request) for request in best_effort),
    )


def held_prefill_s(state: AgentState) -> Seconds:
    """Predicted time until all pulled requests have their first tokens."""
    return sum(predicted_prefill_s(request, state.profile) for request in state.not_begun())


def may_pull(state: AgentState) -> bool:
    """Return whether the instance's state allows pulls, regardless of the bounds of pulled work."""
    return not (
        state.draining or state.swapping or state.model is None or state.model in state.differing
    )


def bounds_now(engine: EngineSnapshot, bounds: PullBounds) -> PullBounds:
    """*bounds* with the engine's KV capacity in tokens, if the engine has reported it."""
    return replace(bounds, max_tokens=engine.kv_capacity_tokens or math.inf)


def pull_state(state: AgentState, engine: EngineSnapshot, bounds: PullBounds) -> PullState:
    """Pulled work, the bounds of pulled work, and whether one more request may be pulled."""
    held = held_now(state, engine, bounds)
    whole = held_now(state, engine, replace(bounds, max_backlog_s=math.inf))
    return PullState(
        requests=held.num_requests,
        max_requests=bounds.window,
        best_effort=held.num_best_effort,
        max_best_effort=bounds.best_effort_window,
        backlog_s=held.regular_s,
        whole_backlog_s=whole.regular_s,
        max_backlog_s=bounds.max_backlog_s,
        tokens=held.regular_tokens + held.best_effort_tokens,
        max_tokens=engine.kv_capacity_tokens,
        room=may_pull(state) and has_room(held, bounds_now(engine, bounds)),
    )


def _work_s(
    state: AgentState, requests: list[QueuedRequest], engine: EngineSnapshot, bounds: PullBounds
) -> Seconds:
    profile, level = state.profile, bounds.backlog_level
    waiting = [request for request in requests if request.request_id in state.window]
    counted = [counted_s(predicted_prefill_s(request, profile), bounds) for request in requests]
    tokens = backlog.tokens(waiting, profile, level=level)
    return work_s(
        prefill_s=backlog.prefills_s(counted, profile, level=level),
        whole_s=tokens / _full_rate_per_s(waiting, profile, engine) if waiting else 0.0,
        num_free_slots=engine.max_running - len(state.runs) - len(state.window) - state.pulling,
    )


def _full_rate_per_s(
    waiting: list[QueuedRequest], profile: Profile | None, engine: EngineSnapshot
) -> float:
    """Predicted tokens per second of an engine that is full of requests similar to *waiting*."""
    if profile is not None and profile.latency is not None:
        prompt = fmean(request.prompt_tokens for request in waiting)
        output = fmean(predicted_output_tokens(request, profile) for request in waiting)
        tokens = max(1.0, prompt + output)
        batch = batch_size(engine.max_running, engine.kv_capacity_tokens or math.inf, tokens)
        full = full_batch(profile.latency, batch=batch, prompt=prompt, output=output)
        if full.token_rate_per_s:
            return full.token_rate_per_s
    return 1 / tokens_s(1.0, profile)
