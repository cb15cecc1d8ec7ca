"""Composition root of the estimator."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from services.estimator.alarms import InstanceWatch, raise_alarms
from services.estimator.handlers import HANDLERS
from services.estimator.metrics import EstimatorMetrics
from services.estimator.profiles import ProfileStore
from services.estimator.settings import Settings
from services.estimator.state import EstimatorState
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_softly
from shared.contracts.base import encode
from shared.runtime.cli import Ports
from shared.runtime.tasks import every

log = structlog.get_logger()


async def serve(ports: Ports[Settings], stop: asyncio.Event) -> None:
    """Learn and publish until *stop*."""
    settings = ports.settings
    store = ProfileStore(Path(settings.profile_dir) if settings.profile_dir else None)
    state = EstimatorState(
        iteration_memory=settings.iteration_memory,
        request_memory=settings.request_memory,
        max_applications=settings.max_applications,
        pooled_requests=settings.pooled_requests,
        watch=InstanceWatch(settings.alarms.options),
    )
    EstimatorMetrics(ports.health.metrics, state)
    state.restore(store.load())
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            ports.open_broker(f"headway-estimator-{os.getpid()}")
        )
        await topology.declare(broker)
        subscription = await broker.consume(
            topology.ESTIMATOR, Dispatcher(HANDLERS, state).handle, prefetch=256
        )
        stack.push_async_callback(subscription.cancel)

        async def publish_changed() -> None:
            await _publish(broker, state, store, ports, only_changed=True)

        async def publish_all() -> None:
            await _publish(broker, state, store, ports, only_changed=False)

        async def watch() -> None:
            await raise_alarms(broker, state.watch, ports.clock.now())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                every(settings.publish_period_s, publish_changed, stop=stop), name="publish.changed"
            )
            tasks.create_task(
                every(settings.refresh_period_s, publish_all, stop=stop), name="publish.all"
            )
            tasks.create_task(
                every(settings.alarms.period_s, watch, stop=stop), name="raise.alarms"
            )
            ports.health.started()
            log.info("service.started", profiles=len(state.learners))
        log.info("service.stopped", profiles=len(state.learners))


async def _publish(
    broker: Broker,
    state: EstimatorState,
    store: ProfileStore,
    ports: Ports[Settings],
    *,
    only_changed: bool,
) -> None:
    for learner in tuple(state.learners.values()):
        if only_changed and not learner.changed:
            continue
        profile = learner.profile(ports.clock.now())
        store.save(profile)
        message = OutMessage(body=encode(profile), kind="profile.published.v1", persistent=False)
        await send_softly(broker, topology.PROFILES, "", message)
