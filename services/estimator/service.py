"""Composition root of the estimator."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import structlog

from services.estimator.alarms import InstanceWatch, raise_alarms
from services.estimator.handlers import HANDLERS
from services.estimator.metrics import EstimatorMetrics
from services.estimator.own_fits import OwnFits
from services.estimator.profiles import ProfileStore
from services.estimator.sample_store import SampleStore
from services.estimator.settings import Settings
from services.estimator.state import EstimatorState
from services.estimator.trees import TreesWatch, publish_trees
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
        samples=SampleStore(settings.samples_directory, most=settings.trees.max_samples),
        trees=TreesWatch(settings.trees_directory),
    )
    EstimatorMetrics(ports.health.metrics, state)
    state.restore(store.load())
    state.samples.open()
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

        async def reload_trees() -> None:
            # Out of the loop's way: the first trees take half a second to import what reads them.
            found = await asyncio.to_thread(state.trees.look)
            for artefact in found:
                log.info("trees.loaded", model=artefact.model, version=artefact.version)
            await publish_trees(broker, found)

        async def publish_all_trees() -> None:
            await publish_trees(broker, state.trees.in_force)

        loops: tuple[tuple[str, float, Callable[[], Awaitable[None]]], ...] = (
            ("publish.changed", settings.publish_period_s, publish_changed),
            ("publish.all", settings.refresh_period_s, publish_all),
            ("raise.alarms", settings.alarms.period_s, watch),
            ("reload.trees", settings.trees.reload_period_s, reload_trees),
            ("publish.trees", settings.trees.refresh_period_s, publish_all_trees),
        )
        async with asyncio.TaskGroup() as tasks:
            for name, period_s, action in loops:
                tasks.create_task(every(period_s, action, stop=stop), name=name)
            if (fit_period_s := settings.trees.fit_period_s) is not None:
                fits = state.fits = OwnFits(settings, state.samples)
                fit = partial(fits.fit, stop)
                tasks.create_task(every(fit_period_s, fit, stop=stop), name="fit.trees")
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
        profile = msgspec.structs.replace(profile, prefill_trees=state.trees.told(learner.key))
        store.save(profile)
        message = OutMessage(body=encode(profile), kind="profile.published.v1", persistent=False)
        await send_softly(broker, topology.PROFILES, "", message)
