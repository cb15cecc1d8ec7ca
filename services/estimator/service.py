"""Creates, connects and runs the estimator's components."""

import asyncio
import os
from functools import partial
from pathlib import Path

import structlog

from services.estimator.alarms import InstanceWatch
from services.estimator.handlers import HANDLERS
from services.estimator.metrics import estimator_metrics
from services.estimator.profiles import ProfileStore
from services.estimator.rounds import Rounds
from services.estimator.settings import Settings
from services.estimator.state import EstimatorState
from services.estimator.stories.keeper import StoryKeeper
from services.estimator.stories.shelf import Shelf
from services.estimator.trees.active_trees import TreesWatch
from services.estimator.trees.auto_fit import OwnFits
from services.estimator.trees.sample_store import SampleStore
from services.estimator.usage.book import DAY_S
from services.estimator.usage.keeper import UsageKeeper
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.declaring import declare_topology
from shared.broker.protocol import Broker
from shared.runtime.cli import Ports
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
    async with ports.open_broker(f"headway-estimator-{os.getpid()}") as broker:
        await declare_topology(broker)
        subscription = await broker.consume(
            topology.ESTIMATOR, Dispatcher(HANDLERS, state).handle, prefetch=256, gathers_acks=True
        )
        try:
            await _run(ports, broker, state, store, stop)
        finally:
            await subscription.cancel()


async def _run(
    ports: Ports[Settings],
    broker: Broker,
    state: EstimatorState,
    store: ProfileStore,
    stop: asyncio.Event,
) -> None:
    """Run all loops until *stop*."""
    settings = ports.settings
    rounds = Rounds(broker=broker, clock=ports.clock, state=state, store=store)
    loops = [
        ("publish.changed", settings.publish_period_s, rounds.publish_changed),
        ("publish.all", settings.refresh_period_s, rounds.publish_all),
        ("raise.alarms", settings.alarms.period_s, rounds.raise_alarms),
        ("reload.trees", settings.trees.reload_period_s, rounds.reload_trees),
        ("publish.trees", settings.trees.refresh_period_s, rounds.publish_trees),
    ]
    async with asyncio.TaskGroup() as tasks:
        for name, period_s, action in loops:
            tasks.create_task(every(period_s, action, stop=stop), name=name)
        usage = UsageKeeper(
            broker=broker,
            clock=ports.clock,
            directory=Path(settings.usage_dir) if settings.usage_dir else None,
            keep_s=settings.usage_days * DAY_S,
        )
        tasks.create_task(usage.run(stop), name="keep.usage")
        if settings.stories:
            shelf = Shelf(settings.kept_stories, heard_since=ports.clock.now())
            stories = StoryKeeper(broker=broker, clock=ports.clock, shelf=shelf)
            tasks.create_task(stories.run(stop), name="keep.stories")
        if (fit_period_s := settings.trees.fit_period_s) is not None:
            fits = state.fits = OwnFits(settings, state.samples)
            fit = partial(fits.fit, stop)
            tasks.create_task(every(fit_period_s, fit, stop=stop), name="fit.trees")
        ports.health.started()
        log.info("service.started", profiles=len(state.learners))
    log.info("service.stopped", profiles=len(state.learners))
