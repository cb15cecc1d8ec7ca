"""Faults of a real mesh delay requests, and the sentence about each names its fault."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.mesh.cli import main
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.rpc import ask
from shared.broker.stories import ask_stories
from shared.contracts.base import Decoder, InstanceId, Message, RequestId
from shared.contracts.control import EvictRequest, LsoAnswered, LsoCommand, LsoOutcome, LsoSwapOut
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.contracts.stories.questions import StoriesRequested
from shared.producer.generation import Generation
from shared.producer.producer import Producer
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import QWEN, mesh_spec, producer_of, request

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]

ENGINE = {"latency": {"constant_s": 0.03, "linear_s": 4e-5}, "cold_activation_s": 2.0}
"""An answer of 100 tokens takes 3 s, and a model swap 2 s."""
TOKENS = 100
FREEZE_S = REST_S = 3.0
RUN_S = 1.5
"""Time for which runs last before their instance is killed."""
CAUSES = {
    "swapped out": "swapped it out",
    "evicted": "evicted it",
    "killed": "died or lost its connection",
    "frozen before the pull": "in its lane",
    "frozen in a run": "was slow",
    "model swap": "activated its model",
}
"""Fault -> words by which a sentence names it."""
decode_answered: Decoder[LsoAnswered] = Decoder(LsoAnswered)


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and what the test did to it."""

    id: RequestId
    fault: str
    """Key of `CAUSES`; empty if nothing was done."""
    is_late: bool


class Faults:
    """Submits requests, and disturbs them."""

    def __init__(self, mesh: ProcessMesh, broker: Broker, producer: Producer) -> None:
        self._mesh, self._broker, self._producer = mesh, broker, producer
        self.cases: list[Case] = []
        self._answers: list[asyncio.Task[None]] = []

    async def submit(
        self, fault: str, *slos: Slo, late: bool = True, **fields: Any
    ) -> Sequence[Generation]:
        """Publish a request for each of *slos*, which *fault* is going to disturb."""
        found = []
        for slo in slos:
            number = len(self.cases)
            values: dict[str, Any] = {"id": f"case-{number}", "slo": slo, "max_tokens": TOKENS}
            body: InferenceRequest = request(number, **(values | fields))
            generation = await self._producer.submit(body, reply=ReplyMode.STREAM)
            self.cases.append(Case(RequestId(f"case-{number}"), fault, late))
            self._answers.append(asyncio.create_task(_completed(generation)))
            found.append(generation)
        return found

    async def ordered(self, case: Case, order: Callable[[InstanceId], LsoCommand]) -> None:
        """Order an operation on a request that runs."""

        async def is_done() -> bool:
            instance_id = await self.holder(case)
            addressed = order(instance_id)

            def question(reply_to: str) -> Message:
                return msgspec.structs.replace(addressed, reply_to=reply_to)

            key = topology.command_instance(instance_id)
            answer = await ask(self._broker, key, question, decode_answered, timeout_s=10.0)
            return isinstance(answer, LsoAnswered) and answer.outcome is LsoOutcome.DONE

        await eventually(is_done, within_s=10.0)

    async def holder(self, case: Case) -> InstanceId:
        """The instance that has a request."""
        found: list[InstanceId] = []

        async def is_held() -> bool:
            answer = await ask_stories(
                self._broker,
                lambda reply_to: StoriesRequested(reply_to=reply_to, request_id=case.id),
            )
            if answer is not None:
                found.extend(each.instance_id for each in answer.held)
            return bool(found)

        await eventually(is_held, within_s=10.0)
        return found[0]

    async def kill(self, instances: Iterable[InstanceId]) -> None:
        """Kill agents as the kernel's OOM killer does."""
        for instance_id in set(instances):
            process = self._mesh.processes[f"agent-{instance_id}"]
            process.signal(signal.SIGKILL)
            assert await process.wait(10.0) == -signal.SIGKILL
            await process.start()

    def signal_agents(self, number: signal.Signals) -> None:
        for name, process in self._mesh.processes.items():
            if name.startswith("agent-"):
                process.signal(number)

    async def completed(self) -> None:
        """Wait for all answers so far."""
        await asyncio.gather(*self._answers)
        self._answers.clear()


async def _completed(generation: Generation) -> None:
    final = await generation.final()
    assert isinstance(final, RequestCompleted), final


async def swap_out(faults: Faults) -> None:
    await faults.submit("swapped out", Slo(ttlt_s=4.5), Slo(ttlt_s=4.5))
    await faults.submit("swapped out", Slo(ttlt_s=60.0), Slo(), late=False)
    for case in faults.cases[-4:]:
        await faults.ordered(
            case,
            lambda instance_id, case=case: LsoSwapOut(  # type: ignore[misc]
                instance_id=instance_id, request_id=case.id, rest_s=REST_S
            ),
        )
    await faults.completed()


async def evict(faults: Faults) -> None:
    await faults.submit("evicted", Slo(ttlt_s=60.0), Slo(ttlt_s=60.0), Slo(), Slo(), late=False)
    for case in faults.cases[-4:]:
        await faults.ordered(
            case,
            lambda instance_id, case=case: EvictRequest(  # type: ignore[misc]
                instance_id=instance_id, request_id=case.id
            ),
        )
    await faults.completed()


async def kill(faults: Faults) -> None:
    """The runs must be old enough that their loss makes them late."""
    await faults.submit("killed", Slo(ttlt_s=4.0), Slo(ttlt_s=4.0))
    await faults.submit("killed", Slo(ttlt_s=60.0), Slo(), late=False)
    holders = [await faults.holder(case) for case in faults.cases[-4:]]
    await asyncio.sleep(RUN_S)
    await faults.kill(holders)
    await faults.completed()


async def freeze(faults: Faults) -> None:
    """Runs stall, and requests that come meanwhile wait in their lanes."""
    slow = Slo(ttft_s=1.0, tbt_s=0.05)
    for generation in await faults.submit("frozen in a run", slow, slow):
        await anext(aiter(generation))
    faults.signal_agents(signal.SIGSTOP)
    await faults.submit("frozen before the pull", Slo(ttft_s=0.5), Slo(ttft_s=0.5), max_tokens=5)
    await asyncio.sleep(FREEZE_S)
    faults.signal_agents(signal.SIGCONT)
    await faults.completed()


async def swap_models(faults: Faults) -> None:
    await faults.submit("model swap", Slo(ttft_s=0.5), Slo(ttft_s=0.5), model=QWEN, max_tokens=5)
    await faults.completed()


async def leave_alone(faults: Faults) -> None:
    await faults.submit("", Slo(ttlt_s=60.0), Slo(), late=False, max_tokens=5)
    await faults.completed()


@asynccontextmanager
async def disturbed(
    rabbit_servers: Callable[[str], RabbitServer], directory: Path
) -> AsyncIterator[tuple[ProcessMesh, Faults]]:
    """A mesh with two agents."""
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(url, directory, agent_settings={"engine": {"simulated": ENGINE}})
        async with (
            ProcessMesh(spec) as mesh,
            mesh.open_broker("headway-faults") as broker,
            producer_of(mesh) as producer,
        ):
            yield mesh, Faults(mesh, broker, producer)


async def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code and output of `headway`."""
    capsys.readouterr()
    code = await asyncio.to_thread(main, list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def names(case: Case, sentence: str) -> bool:
    """Return whether a sentence names the fault, and no other one."""
    named = {fault for fault, words in CAUSES.items() if words in sentence}
    return named == ({case.fault} if case.fault else set())


async def test_the_sentence_names_the_fault(
    rabbit_servers: Callable[[str], RabbitServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Ten requests are late, and fourteen are evicted, relegated or resumed."""
    async with disturbed(rabbit_servers, tmp_path) as (mesh, faults):
        for fault in (swap_out, evict, kill, freeze, leave_alone, swap_models):
            await fault(faults)
        to = ("--amqp-url", mesh.spec.broker)
        shown: dict[str, Any] = {}
        for case in faults.cases:

            async def is_kept(case: Case = case) -> bool:
                code, out, _ = await printed(capsys, "request", "show", case.id, "--json", *to)
                if code == EXIT_OK:
                    shown[case.id] = json.loads(out)
                return code == EXIT_OK

            await eventually(is_kept, within_s=10.0)
        _, listed, _ = await printed(capsys, "requests", "--late", "--json", *to)
        unknown, _, error = await printed(capsys, "request", "show", "case-x", *to)
        async with httpx.AsyncClient(timeout=60.0) as client:
            url = f"{mesh.spec.gateway_url}/v1/stories"
            answer = await client.get(url, params={"tenant": "guest"})

    found = [(case, shown[case.id]["sentence"]) for case in faults.cases]
    wrong = [(case, sentence) for case, sentence in found if not names(case, sentence)]
    with capsys.disabled():
        for case, sentence in found:
            print(f"{'  ' if names(case, sentence) else '! '}{case.fault or '-'}: {sentence}")
    late = {case.id for case in faults.cases if case.is_late}
    touched = [
        each for each in shown.values() if each["history"] or each["relegated"] or each["evictions"]
    ]
    assert len(found) - len(wrong) >= 18, wrong
    assert (len(found), len(late)) == (20, 10)
    assert {name for name, each in shown.items() if each["late"]} == late
    assert {each["id"] for each in json.loads(listed)} == late
    assert len(touched) >= 12
    assert unknown == EXIT_FAILED
    assert "there is no record of request case-x" in error
    assert {each["id"] for each in answer.json()["data"]} == set(shown)
