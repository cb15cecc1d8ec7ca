"""Handlers of the estimator's messages. Messages of unknown kinds are ignored."""

from services.estimator.state import EstimatorState
from services.estimator.telemetry_adapters import time_multiples
from shared.broker.consumer import Handler
from shared.broker.protocol import Delivery
from shared.contracts.base import Message
from shared.contracts.routing import PrefillsSampled
from shared.contracts.telemetry import (
    InstanceStatus,
    IterationsObserved,
    ModelActivated,
    RequestObserved,
)


async def on_iterations_observed(
    message: IterationsObserved, state: EstimatorState, _delivery: Delivery
) -> None:
    learner = state.learner(message.model, message.engine, message.device)
    if learner.latest is not None and learner.latest.latency is not None:
        multiples = time_multiples(message, learner.latest.latency)
        state.watch.observe(message, multiples)
        learner.judge_latency(multiples, at=message.at)
    learner.on_iterations(message)


async def on_request_observed(
    message: RequestObserved, state: EstimatorState, _delivery: Delivery
) -> None:
    state.learner(message.model, message.engine, message.device).on_request(message)


async def on_instance_status(
    message: InstanceStatus, state: EstimatorState, _delivery: Delivery
) -> None:
    state.identities[message.instance_id] = (message.engine, message.device)


async def on_model_activated(
    message: ModelActivated, state: EstimatorState, _delivery: Delivery
) -> None:
    if (identity := state.identities.get(message.instance_id)) is not None:
        state.learner(message.model, *identity).on_activated(message)


async def on_prefills_sampled(
    message: PrefillsSampled, state: EstimatorState, _delivery: Delivery
) -> None:
    state.samples.take(message)


HANDLERS: dict[type[Message], Handler[EstimatorState]] = {
    IterationsObserved: on_iterations_observed,
    RequestObserved: on_request_observed,
    InstanceStatus: on_instance_status,
    ModelActivated: on_model_activated,
    PrefillsSampled: on_prefills_sampled,
}
