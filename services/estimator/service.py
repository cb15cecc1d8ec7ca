"""Creates, connects and runs the estimator's components."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import structlog

from services.estimator.alarms import InstanceWatch, raise_alarms
from services.estimator.handlers import HANDLERS
from services.estimator.metrics import estimator_metrics
from services.estimator.profiles import ProfileStore
from services.estimator.settings import Settings
from services.estimator.state import EstimatorState, Learner
from services.estimator.trees.active_trees import TreesWatch, publish_trees
from services.estimator.trees.auto_fit import OwnFits
from services.estimator.trees.sample_store import SampleStore
from services.estimator.usage.keeper import UsageKeeper
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.declaring import declare_topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import encode
from shared.runtime.cli import Ports
from shared.runtime.clock import Clock
from shared.runtime.tasks import every

log = structlog.get_logger()


async def serve(ports: Ports[Settings], stop: asyncio.Event) -> None:
    """Learn from telemetry and publish profiles until *stop*."""
    settings = ports.settings
    store = ProfileStore(Path(settings.profile_dir) if settings.profile_dir else None)
    state = EstimatorState(
        iteration_memory=settings.iteration_memory,
        request_memory=settings.request_memory,
        max_applications=settings.max_applications,
        pooled_requests=settings.pooled_requests,
        watch=InstanceWatch(settings.alarms),
        samples=SampleStore(settings.samples_directory, most=settings.trees.max_samples),
        trees=TreesWatch(settings.trees_directory),
    )
    estimator_metrics(ports.health.metrics, state)
    state.restore(store.load())
    state.samples.open()
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            ports.open_broker(f"headway-estimator-{os.getpid()}")
        )
        await declare_topology(broker)
        subscription = await broker.consume(
            topology.ESTIMATOR, Dispatcher(HANDLERS, state).handle, prefetch=256
        )
        stack.push_async_callback(subscription.cancel)

        async def publish_changed() -> None:
            changed = [each for each in state.learners.values() if each.changed]
            await _publish(changed, broker, state, store, ports.clock)

        async def publish_all() -> None:
            await _publish(tuple(state.learners.values()), broker, state, store, ports.clock)

        async def watch() -> None:
            await raise_alarms(broker, state.watch, ports.clock.now())

        async def reload_trees() -> None:
            # Run this in a thread: the first trees import modules for half a second.
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
            usage = UsageKeeper(
                broker=broker,
                clock=ports.clock,
                directory=Path(settings.usage_dir) if settings.usage_dir else None,
            )
            tasks.create_task(usage.run(stop), name="keep.usage")
            if (fit_period_s := settings.trees.fit_period_s) is not None:
                fits = state.fits = OwnFits(settings, state.samples)
                fit = partial(fits.fit, stop)
                tasks.create_task(every(fit_period_s, fit, stop=stop), name="fit.trees")
            ports.health.started()
            log.info("service.started", profiles=len(state.learners))
        log.info("service.stopped", profiles=len(state.learners))


async def _publish(
    learners: Iterable[Learner],
    broker: Broker,
    state: EstimatorState,
    store: ProfileStore,
    clock: Clock,
) -> None:
    for learner in learners:
        profile = msgspec.structs.replace(
            learner.profile(clock.now()), prefill_trees=state.trees.in_force_for(learner.key)
        )
        store.save(profile)
        message = OutMessage(body=encode(profile), kind="profile.published.v1", persistent=False)
        await send_best_effort(broker, topology.PROFILES, "", message)
