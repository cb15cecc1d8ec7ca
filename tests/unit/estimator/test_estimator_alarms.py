"""Alarms of the estimator."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from ops.sim.virtual_time import LoopClock
from services.estimator.alarms import InstanceWatch, raise_alarms
from services.estimator.metrics import estimator_metrics
from services.estimator.service import serve
from services.estimator.settings import AlarmSettings, Settings
from services.estimator.state import EstimatorState
from services.estimator.telemetry_adapters import time_multiples
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec, OutMessage, QueueSpec, QueueType
from shared.contracts.base import Decoder, InstanceId, ModelName, encode
from shared.contracts.errors import SettingsError
from shared.contracts.estimates import AlarmKind, AlarmRaised, LatencyCoefficients
from shared.contracts.telemetry import Iteration, IterationsObserved
from shared.runtime.cli import Ports
from shared.runtime.health import Health
from shared.runtime.settings import load
from solver.prediction.alarms.alarm import AlarmOptions
from tests.brokers import eventually
from tests.clocks import NOW

pytestmark = pytest.mark.virtual_time

M = ModelName("m")
LATENCY = LatencyCoefficients(constant_s=0.01, linear_s=1e-4)
HEARD = QueueSpec(name="heard", type=QueueType.CLASSIC)


def computed(instance: str, *, times: float = 1.0, device: str = "d") -> IterationsObserved:
    """Iterations that take *times* times 10 ms plus 0.1 ms per token."""
    return IterationsObserved(
        instance_id=InstanceId(instance),
        model=M,
        engine="e",
        device=device,
        at=NOW,
        iterations=tuple(
            Iteration(
                compute_tokens=tokens,
                context_tokens=0,
                num_decodes=1,
                duration_s=times * (0.01 + 1e-4 * tokens),
            )
            for tokens in range(1, 129)
        ),
    )


def a_watch() -> InstanceWatch:
    return InstanceWatch(AlarmOptions(raise_above=1.5, clear_below=1.2, patience=2))


def observe(watch: InstanceWatch, observed: IterationsObserved) -> None:
    watch.observe(observed, time_multiples(observed, LATENCY))


async def rounds(broker: MemoryBroker, watch: InstanceWatch, **times: float) -> None:
    """Run as many rounds as an alarm needs."""
    for number in range(2):
        for instance, each in times.items():
            observe(watch, computed(instance, times=each))
        await raise_alarms(broker, watch, NOW + number)


@asynccontextmanager
async def listening():
    """A broker, and the alarms published so far."""
    broker = MemoryBroker(MemoryHub())
    async with broker:
        await topology.declare(broker)
        await broker.declare_queue(HEARD)
        await broker.bind(
            BindingSpec(exchange=topology.TELEMETRY, queue="heard", routing_key="alarm.#")
        )
        yield broker


async def heard(broker: MemoryBroker) -> list[AlarmRaised]:
    decode: Decoder[AlarmRaised] = Decoder(AlarmRaised)
    alarms = []
    while (delivery := await broker.get("heard")) is not None:
        alarms.append(decode(delivery.body))
    return alarms


async def test_slow_instance_is_reported_once():
    async with listening() as broker:
        watch = a_watch()
        with capture_logs() as logs:
            await rounds(broker, watch, i1=1.0, i2=2.0)
            await rounds(broker, watch, i1=1.0, i2=2.0)
        (alarm,) = await heard(broker)

        assert (alarm.alarm, alarm.instance_id) == (AlarmKind.INSTANCE_SLOW, "i2")
        assert alarm.detail == "2.0 times as slow as its peers on m (e, d)"
        (event,) = logs
        assert (event["event"], event["times_as_slow"]) == ("alarm.raised", 2.0)
        assert (watch.num_slow, watch.num_raised) == (1, 1)


async def test_alarm_reaches_the_leader():
    async with listening() as broker:
        await rounds(broker, a_watch(), i1=1.0, i2=2.0)

        depth = await broker.depth(topology.LEADER)
        assert depth is not None
        assert depth.ready == 1


async def test_end_of_an_alarm_is_logged():
    async with listening() as broker:
        watch = a_watch()
        await rounds(broker, watch, i1=1.0, i2=2.0)
        await heard(broker)
        with capture_logs() as logs:
            await rounds(broker, watch, i1=1.0, i2=1.0)

        assert [each["event"] for each in logs] == ["alarm.cleared"]
        assert await heard(broker) == []
        assert (watch.num_slow, watch.num_raised) == (0, 1)


async def test_instances_of_other_devices_are_not_peers():
    async with listening() as broker:
        watch = a_watch()
        for number in range(3):
            observe(watch, computed("i1"))
            observe(watch, computed("i2", times=3.0, device="old"))
            await raise_alarms(broker, watch, NOW + number)

        assert await heard(broker) == []
        assert list(watch.levels()) == []


def test_iterations_without_a_time_are_left_out():
    observed = computed("i1", times=2.0)
    nothing = tuple(
        Iteration(compute_tokens=tokens, context_tokens=0, num_decodes=0, duration_s=duration_s)
        for tokens, duration_s in ((0, 0.1), (5, 0.0))
    )

    assert time_multiples(observed, LATENCY) == pytest.approx([2.0] * 128)
    for iterations, latency in (
        (nothing, LATENCY),
        (observed.iterations, LatencyCoefficients(constant_s=0, linear_s=0)),
    ):
        assert (
            time_multiples(
                IterationsObserved(
                    instance_id=InstanceId("i"),
                    model=M,
                    engine="e",
                    device="d",
                    at=0.0,
                    iterations=iterations,
                ),
                latency,
            )
            == []
        )


def test_metrics_show_alarms_and_paces():
    registry = CollectorRegistry()
    state = EstimatorState(
        iteration_memory=100, request_memory=100, max_applications=1, watch=a_watch()
    )
    estimator_metrics(registry, state)
    for number in range(2):
        for instance, times in (("i1", 1.0), ("i2", 2.0)):
            observe(state.watch, computed(instance, times=times))
        state.watch.judge(NOW + number)
    kind = {"kind": "instance_slow"}
    where = {"model": "m", "engine": "e", "device": "d", "instance_id": "i2"}

    assert registry.get_sample_value("headway_estimator_alarms", kind) == 1
    assert registry.get_sample_value("headway_estimator_alarms_raised_total", kind) == 1
    pace = registry.get_sample_value("headway_estimator_instance_pace_ratio", where)
    assert pace == pytest.approx(2.0)
    slow = "headway_estimator_instance_slow"
    assert registry.get_sample_value(slow, where) == 1
    assert registry.get_sample_value(slow, where | {"instance_id": "i1"}) == 0


async def test_running_estimator_raises_alarms():
    hub = MemoryHub()

    @asynccontextmanager
    async def open_broker(name: str):
        async with MemoryBroker(hub, client_name=name) as opened:
            yield opened

    settings = Settings(publish_period_s=0.01, alarms=AlarmSettings(period_s=0.01, patience=2))
    ports = Ports(
        settings=settings,
        open_broker=open_broker,
        clock=LoopClock(),
        health=Health(service="estimator"),
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks, MemoryBroker(hub) as far:
        tasks.create_task(serve(ports, stop))
        await eventually(lambda: ports.health.ready)
        await far.declare_queue(HEARD)
        await far.bind(
            BindingSpec(exchange=topology.TELEMETRY, queue="heard", routing_key="alarm.#")
        )
        alarms: list[AlarmRaised] = []

        async def warned() -> bool:
            for message in (computed("i1"), computed("i2", times=3.0)):
                await far.send(
                    topology.TELEMETRY,
                    topology.OBSERVED_ENGINE_KEY,
                    OutMessage(body=encode(message)),
                )
            alarms.extend(await heard(far))
            return bool(alarms)

        await eventually(warned)
        stop.set()

    assert {alarm.instance_id for alarm in alarms} == {"i2"}


def test_thresholds_in_the_wrong_order_are_refused_by_name():
    with pytest.raises(SettingsError, match=r"clear_below is 1\.6: .*below raise_above, 1\.5"):
        load(
            Settings,
            service="estimator",
            environ={"HEADWAY_ESTIMATOR_ALARMS__CLEAR_BELOW": "1.6"},
        )
