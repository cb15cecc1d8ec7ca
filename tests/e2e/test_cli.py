"""Operators' commands against a running mesh."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import BindingSpec, OutMessage, Settlement
from shared.contracts.lanes import inbox_name
from shared.contracts.requests import ReplyMode
from shared.producer.producer import Producer
from tests.brokers import eventually
from tests.e2e.commands import Ran, run
from tests.e2e.meshes import LLAMA, request

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]


async def run_until(
    mesh: ProcessMesh, holds: Callable[[Ran], bool], module: str, *arguments: str
) -> Ran:
    """
    Run a command until it succeeds and *holds* is true; return the last run.

    The command is repeated, because on a busy machine it may time out before the answer arrives.
    """
    ran = Ran(0, "", "")

    async def has_held() -> bool:
        nonlocal ran
        ran = await run(mesh, module, *arguments)
        return ran.code == 0 and holds(ran)

    try:
        await eventually(has_held, within_s=60.0)
    except AssertionError as never:
        seen = f"exit code {ran.code}, {ran.out!r}, {ran.err!r}"
        raise AssertionError(f"{module} {' '.join(arguments)}: the last run gave {seen}") from never
    return ran


async def submit(mesh: ProcessMesh, *arguments: str) -> Ran:
    return await run(
        mesh, "mesh", "submit", "--model", LLAMA, "--max-tokens", "12", "--temperature", "0",
        *arguments,
    )  # fmt: skip


async def test_submit_prints_the_answer_and_its_cost(mesh: ProcessMesh) -> None:
    streamed = await submit(mesh, "--ttft", "60", "count to five")
    whole = await submit(mesh, "--json", "count to five")

    assert (streamed.code, whole.code) == (0, 0)
    assert whole.json["text"] == streamed.out.removesuffix("\n")
    assert "SLO attained" in streamed.err


@pytest.mark.slow
async def test_submit_reads_many_requests_from_a_file(mesh: ProcessMesh, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    bodies = [{"id": f"file-{n}", "model": LLAMA, "prompt": "x", "max_tokens": 3} for n in range(5)]
    file.write_text("\n".join(json.dumps(body) for body in bodies))

    ran = await run(mesh, "mesh", "submit", "--file", str(file))

    assert ran.code == 0
    assert {body["id"] for body in bodies} == {final["request_id"] for final in ran.lines}


async def test_submit_shows_the_reason_of_a_refusal(mesh: ProcessMesh) -> None:
    ran = await run(mesh, "mesh", "submit", "--model", "no-such", "x")

    assert ran.code == 1
    assert "model_not_found" in ran.err


async def test_exit_code_without_a_broker_is_3(mesh: ProcessMesh) -> None:
    ran = await run(
        mesh, "mesh", "submit", "--amqp-url", "amqp://guest:guest@127.0.0.1:1/", "--model", "m", "x"
    )

    assert ran.code == 3


async def test_queues_lists_depths(mesh: ProcessMesh) -> None:
    def names(ran: Ran) -> set[str]:
        return {entry["queue"] for entry in ran.json}

    inboxes = {inbox_name("a0"), inbox_name("a1")}
    # Inboxes are listed by a leader.
    ran = await run_until(mesh, lambda ran: inboxes <= names(ran), "mesh", "queues", "--json")

    fixed = {topology.GLOBAL_INTERACTIVE, topology.GLOBAL_REST, topology.DEAD_LETTERS}
    assert fixed | inboxes <= names(ran)


async def test_doctor_finds_nothing_wrong_with_a_running_mesh(mesh: ProcessMesh) -> None:
    ran = await run(mesh, "mesh", "doctor", "--json")
    assert [each for each in ran.json if each["level"] == "deviation"] == []
    assert ran.code == 0
    (services,) = [each["what"] for each in ran.json if each["check"] == "services"]
    assert services == "2 agents, 1 groupers report"


async def test_doctor_exits_with_1_if_there_is_a_deviation(mesh: ProcessMesh) -> None:
    ran = await run(mesh, "mesh", "doctor", "--amqp-url", "amqp://127.0.0.1:1/")
    assert (ran.code, "connection" in ran.out) == (1, True)


async def test_top_shows_every_instance(mesh: ProcessMesh) -> None:
    instances = {agent.instance_id for agent in mesh.spec.agents}

    def shows_all(ran: Ran) -> bool:
        return instances == {entry["instance_id"] for entry in ran.json["instances"]}

    assert shows_all(await run_until(mesh, shows_all, "mesh", "top", "--json"))


async def test_snapshot_shows_one_instance(mesh: ProcessMesh) -> None:
    ran, absent = await asyncio.gather(
        snapshot_of_a0(mesh),
        run(mesh, "agent", "snapshot", "--set", "instance_id=absent", "--json"),
    )

    assert ran.json["instance_id"] == "a0"
    assert absent.code == 1
    assert "absent" in absent.err


@pytest.mark.slow
async def test_snapshot_shows_the_bounds_of_pulls(mesh: ProcessMesh) -> None:
    ran = await snapshot_of_a0(mesh)

    assert ran.json["pull"]["max_requests"] > 0
    assert ran.json["pull"]["max_tokens"] == ran.json["kv_capacity_tokens"]


async def snapshot_of_a0(mesh: ProcessMesh) -> Ran:
    reported = "--set", "instance_id=a0", "--json"
    return await run_until(mesh, lambda ran: bool(ran.json), "agent", "snapshot", *reported)


@pytest.mark.slow
async def test_lso_commands_are_answered(mesh: ProcessMesh) -> None:
    a0 = ("--set", "instance_id=a0", "--json")
    limited = await run(mesh, "agent", "lso", "set", "--max-running", "32", *a0)
    again = await run(mesh, "agent", "lso", "set", "--max-running", "32", *a0)
    unknown = await run(mesh, "agent", "lso", "evict", "no-such-request", *a0)
    absent = await run(mesh, "agent", "lso", "pull", "--set", "instance_id=absent")

    assert (limited.code, limited.json["outcome"]) == (0, "done")
    assert (again.code, again.json["outcome"]) == (0, "already")
    assert (unknown.code, unknown.json["outcome"]) == (1, "refused")
    assert "no-such-request is unknown to a0" in unknown.json["message"]
    assert (absent.code, absent.out) == (1, "")
    assert "absent" in absent.err


async def test_show_plan_shows_every_virtual_queue(mesh: ProcessMesh) -> None:
    def shows_both(ran: Ran) -> bool:
        return {"a0", "a1"} == {plan["queue"]["instance_id"] for plan in ran.lines}

    assert shows_both(await run_until(mesh, shows_both, "planner", "show-plan", "--json"))


@pytest.mark.slow
async def test_estimator_show_prints_the_learnt_profile(mesh: ProcessMesh) -> None:
    await submit(mesh, "warm up")

    def shows_it(ran: Ran) -> bool:
        return LLAMA in {profile["model"] for profile in ran.lines}

    assert shows_it(await run_until(mesh, shows_it, "estimator", "show", "--json"))


@pytest.mark.slow
async def test_tail_prints_finished_requests_once(mesh: ProcessMesh, producer: Producer) -> None:
    tail = asyncio.create_task(run(mesh, "gateway", "tail", "--limit", "3", "--json"))
    asked: list[str] = []

    async def seen() -> bool:
        generation = await producer.submit(request(0, max_tokens=4), reply=ReplyMode.FINAL)
        asked.append(generation.request_id)
        await generation.final()
        return tail.done()

    await eventually(seen, within_s=40.0)
    lines = (await tail).lines
    printed = {line["request_id"] for line in lines}

    assert [line["model"] for line in lines] == [LLAMA] * 3
    assert len(printed) == 3
    assert printed <= set(asked)


@pytest.mark.slow
async def test_dead_letters_are_listed_retried_and_dropped(mesh: ProcessMesh) -> None:
    async with mesh.open_broker("headway-check") as broker:
        await broker.purge(topology.DEAD_LETTERS)
        for number in range(3):
            await broker.publish(
                topology.REQUESTS,
                topology.REST_KEY,
                OutMessage(body=b"not json", message_id=f"broken-{number}"),
            )

        async def dead_lettered() -> bool:
            depth = await broker.depth(topology.DEAD_LETTERS)
            return depth is not None and depth.ready == 3

        await eventually(dead_lettered)
        peeked = await run(mesh, "mesh", "dead-letter", "peek", "--json")
        letters = topology.temporary_queue("letters")
        await broker.declare_queue(letters)
        await broker.bind(BindingSpec(exchange=topology.DEAD, queue=letters.name, routing_key=""))
        again = await run(mesh, "mesh", "dead-letter", "requeue", "--id", "broken-1", "--json")
        returned: list[str | None] = []

        async def has_returned() -> bool:
            if (delivery := await broker.get(letters.name)) is not None:
                returned.append(delivery.message_id)
                await delivery.settle(Settlement.ACK)
            return bool(returned)

        await eventually(has_returned)  # the requeued request is refused and dead-lettered again
        await eventually(dead_lettered)
        refused = await run(mesh, "mesh", "dead-letter", "purge")
        one = await run(mesh, "mesh", "dead-letter", "peek", "--id", "broken-2", "--json")
        none = await run(mesh, "mesh", "dead-letter", "peek", "--id", "broken-3", "--json")
        dropped = await run(
            mesh, "mesh", "dead-letter", "purge", "--id", "broken-2", "--yes", "--json"
        )
        purged = await run(mesh, "mesh", "dead-letter", "purge", "--yes", "--json")

    assert sorted(e["id"] for e in peeked.json) == ["broken-0", "broken-1", "broken-2"]
    assert all(entry["reason"].startswith("invalid_request") for entry in peeked.json)
    assert [entry["id"] for entry in again.json] == ["broken-1"]
    assert returned == ["broken-1"]
    assert refused.code == 2
    assert [entry["id"] for entry in one.json] == ["broken-2"]
    assert (none.json, none.code) == ([], 1)
    assert dropped.json == {"purged": 1}
    assert purged.json == {"purged": 2}


@pytest.mark.slow
async def test_a_drained_instance_takes_nothing_more_and_others_serve(mesh: ProcessMesh) -> None:
    reported = "--set", "instance_id=a1", "--json"
    # Draining the instance again changes nothing.
    drained = await run_until(mesh, lambda ran: bool(ran.json), "agent", "drain", *reported)
    answers = [await submit(mesh, "--json", f"after the drain {n}") for n in range(4)]

    assert drained.json == {"instance_id": "a1", "drained": True}
    assert {"a0"} == {answer.json["instance_id"] for answer in answers}
