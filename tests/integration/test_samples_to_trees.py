"""From routers' samples to the trees that routers use, over a broker."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
from structlog.testing import capture_logs

from services.estimator.service import serve
from services.estimator.settings import Settings, TreesSettings
from services.estimator.trees import artefacts
from services.estimator.trees.artefact_names import directory_name
from services.estimator.trees.fitting import fit_samples
from services.estimator.trees.sample_files import read_samples
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import encode, tag_of
from shared.contracts.estimates import Profile
from shared.contracts.routing import PrefillsSampled, PrefillTrees
from shared.contracts.telemetry import Iteration, IterationsObserved
from shared.runtime.cli import Ports
from shared.runtime.clock import SystemClock
from shared.runtime.health import Health
from solver.prediction.prefill.quantile_trees import decode
from tests.brokers import BrokerRig, eventually
from tests.clocks import NOW
from tests.prefill_times import NOMINAL, matrix_of, requests_of
from tests.sampled import KEY, MODEL, messages_of, plain, sampled

REQUESTS = requests_of(NOMINAL, 600, seed=7)


class Router:
    """Client that publishes samples, and receives trees and profiles."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.trees: list[PrefillTrees] = []
        self.profiles: list[Profile] = []

    async def listen(self) -> None:
        queue = topology.temporary_queue("router")
        await self._broker.declare_queue(queue)
        binding = BindingSpec(exchange=topology.PROFILES, queue=queue.name, routing_key="")
        await self._broker.bind(binding)
        await self._broker.consume(queue.name, self._hear, prefetch=16)

    async def _hear(self, delivery: Delivery) -> None:
        if delivery.kind == tag_of(PrefillTrees):
            self.trees.append(msgspec.json.decode(delivery.body, type=PrefillTrees))
        else:
            self.profiles.append(msgspec.json.decode(delivery.body, type=Profile))
        await delivery.settle(Settlement.ACK)

    async def deliver(self, message: PrefillsSampled | IterationsObserved) -> None:
        key = topology.OBSERVED_SAMPLES_KEY
        if isinstance(message, IterationsObserved):
            key = topology.OBSERVED_ENGINE_KEY
        out = OutMessage(body=encode(message), persistent=False)
        await self._broker.send(topology.TELEMETRY, key, out)


@asynccontextmanager
async def estimator(
    rig: BrokerRig, directory: Path, *, fit_period_s: float | None = None
) -> AsyncIterator[Health]:
    health, stop = Health(service="estimator"), asyncio.Event()
    trees = TreesSettings(reload_period_s=0.05, refresh_period_s=0.5, fit_period_s=fit_period_s)
    settings = Settings(profile_dir=str(directory), trees=trees, refresh_period_s=0.2)
    ports = Ports(settings=settings, open_broker=rig.open, clock=SystemClock(), health=health)
    serving = asyncio.create_task(serve(ports, stop))
    try:
        await eventually(lambda: health.ready or serving.done())
        yield health
    finally:
        stop.set()
        await serving


def value(health: Health, series: str, **labels: str) -> float | None:
    return health.metrics.get_sample_value(f"headway_estimator_{series}", labels)


def num_kept(directory: Path) -> int:
    if not directory.is_dir():
        return 0
    return sum(len(each.at) for each in read_samples(directory, most=999).by_key.values())


def fit(directory: Path) -> Path:
    """Run the command's fit in this process."""
    samples = read_samples(directory / "samples", most=20_000).by_key[KEY]
    fitted = fit_samples(KEY, samples, None, now=NOW).artefact
    return artefacts.write(directory / "trees", fitted)[1]


def fits() -> list[psutil.Process]:
    """
    Child processes of this test that fit trees.

    A child that ends during the check does not count.
    """
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):
            if "fit" in each.cmdline():
                found.append(each)
    return found


async def test_samples_become_trees_and_a_broken_file_has_no_effect(
    broker_rig: BrokerRig, tmp_path: Path
):
    labels: dict[str, Any] = dict(zip(("model", "engine", "device"), KEY, strict=True))
    async with estimator(broker_rig, tmp_path) as health:
        router = Router(await broker_rig.connect("router"))
        await router.listen()
        await router.deliver(sampled(plain(), schema_version=99))
        await router.deliver(sampled(plain(), plain(running=-1.0)))
        for message in messages_of(REQUESTS):
            await router.deliver(message)
        await eventually(lambda: value(health, "prefill_samples", **labels) == 601)
        assert value(health, "prefill_samples_refused_total", reason="schema_version") == 1
        assert value(health, "prefill_samples_refused_total", reason="running") == 1
        assert router.trees == []

        first = fit(tmp_path)
        await eventually(lambda: len(router.trees) >= 2)
        assert {(each.version, each.model) for each in router.trees} == {(1, MODEL)}
        trees = decode(bytes(router.trees[0].trees))
        assert trees.predict(matrix_of(REQUESTS)).quantiles_s.shape == (600, 3)

        with capture_logs() as logs:
            broken = tmp_path / "v2.json"
            body = first.read_bytes()
            broken.write_bytes(body.replace(b'"schema_version":1', b'"schema_version":9'))
            broken = broken.rename(first.with_name("v2.json"))
            await eventually(lambda: value(health, "trees_refused_total", reason="schema") == 1)
        (refused,) = [each for each in logs if each["event"] == "trees.refused"]
        assert (refused["file"], refused["field"]) == (str(broken), "schema_version")
        assert value(health, "trees_version", **labels) == 1

        one = Iteration(compute_tokens=8, context_tokens=0, num_decodes=0, duration_s=0.01)
        await router.deliver(
            IterationsObserved(
                instance_id="i",
                model=MODEL,
                engine=KEY[1],
                device=KEY[2],
                at=NOW,
                iterations=(one,),
            )
        )
        await eventually(lambda: bool(router.profiles))
        reported = router.profiles[-1].prefill_trees
        assert reported is not None
        assert (reported.version, reported.samples) == (1, 481)
        assert {each.version for each in router.trees} == {1}


async def test_a_restarted_estimator_keeps_its_samples_and_announces_trees(
    broker_rig: BrokerRig, tmp_path: Path
):
    router = Router(await broker_rig.connect("router"))
    await topology.declare(await broker_rig.connect("first"))
    await router.listen()
    async with estimator(broker_rig, tmp_path):
        for message in messages_of(REQUESTS):
            await router.deliver(message)
        await eventually(lambda: num_kept(tmp_path / "samples") == 600)
    fit(tmp_path)
    async with estimator(broker_rig, tmp_path) as health:
        labels: dict[str, Any] = dict(zip(("model", "engine", "device"), KEY, strict=True))
        assert value(health, "prefill_samples", **labels) == 600
        await eventually(lambda: bool(router.trees))


async def test_an_estimator_fits_trees_by_itself_when_configured(
    broker_rig: BrokerRig, tmp_path: Path
):
    """Too few new samples start no fit; enough samples are fitted in another process."""
    async with estimator(broker_rig, tmp_path, fit_period_s=0.1) as health:
        router = Router(await broker_rig.connect("router"))
        await router.listen()
        messages = messages_of(REQUESTS)
        for message in messages[:9]:
            await router.deliver(message)
        await eventually(lambda: num_kept(tmp_path / "samples") == 450)
        await asyncio.sleep(0.3)
        assert value(health, "fits_total", outcome="too_few") is None
        for message in messages[9:]:
            await router.deliver(message)
        await eventually(lambda: bool(router.trees), within_s=90.0)
        await eventually(lambda: value(health, "fits_total", outcome="written") == 1)


async def test_a_stopping_estimator_does_not_wait_for_its_fit(
    broker_rig: BrokerRig, tmp_path: Path
):
    async with estimator(broker_rig, tmp_path, fit_period_s=0.05):
        router = Router(await broker_rig.connect("router"))
        for message in messages_of(REQUESTS):
            await router.deliver(message)
        await eventually(lambda: bool(fits()))

    assert fits() == []
    assert not (tmp_path / "trees").exists()


def test_a_killed_process_loses_at_most_the_last_line(tmp_path: Path):
    """A writer is killed by SIGKILL five times; each new writer continues the file."""
    code = (
        "import sys; from pathlib import Path\n"
        "from services.estimator.trees.sample_store import SampleStore\n"
        "from shared.runtime.logging import configure_logging\n"
        "from tests.sampled import plain, sampled\n"
        "configure_logging(level='error', service='estimator')\n"
        "store = SampleStore(Path(sys.argv[1]), most=100_000); store.open()\n"
        "while True:\n"
        "    store.take(sampled(*[plain(0.5)] * 40)); print(40, flush=True)\n"
    )
    reported = 0
    for _ in range(5):
        command = [sys.executable, "-c", code, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process:
            for _ in range(30):
                reported += int(process.stdout.readline())
            os.kill(process.pid, signal.SIGKILL)
            reported += sum(int(line) for line in process.stdout.read().split())
    found = read_samples(tmp_path, most=1_000_000)
    count = len(found.by_key[KEY].prefill_s)

    assert reported <= count <= reported + 5 * 40
    assert len(found.problems) <= 1
    assert (tmp_path / directory_name(KEY) / "latest.jsonl").exists()
