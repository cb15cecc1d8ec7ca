"""
The unpacked compose archive with the images of the version, on a container engine: start, load,
kills, a broker restart, stop, and start again.
"""

import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from ops.clients.packing import version
from ops.release.images import build_images, image_name
from shared.client.client import Client
from shared.contracts.stored import RequestState
from tests.e2e.containers.stack import STEP_S, Stack, image_bytes, require_engine

pytestmark = pytest.mark.slow

IMAGES = {
    "gateway": 500,
    "planner": 850,
    "estimator": 800,
    "agent": 450,
    "headway": 1200,
}
"""Target -> largest size in MB, on any base of 200 MB."""
FIRST_TOKEN_S = 45.0
DEMO_S = 180.0
DOWN_S = 15.0
REFUSALS = ("status 429", "status 500", "status 502", "status 503", "status 504", "connection: ")
"""What a request over HTTP may get instead of an answer while the broker restarts."""


@pytest.fixture(scope="module", autouse=True)
def images() -> dict[str, int]:
    """Sizes of the images, which are built unless their layers are there."""
    require_engine()
    built = build_images(tuple(IMAGES), print)
    return {image.name: image.num_bytes for image in built}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("release"))
    yield made
    made.close()


@pytest.fixture
async def up(stack: Stack) -> Stack:
    """The mesh, started unless it runs."""
    await stack.run("up", "--detach", "--wait")
    await stack.first_tokens()
    return stack


async def all_answers(client: Client, number: int, *, max_tokens: int = 32) -> list[str]:
    """Submit requests over AMQP at once, and wait for the text of each."""

    async def one() -> str:
        answer = await client.submit(
            model="tiny-llama", prompt="hello", max_tokens=max_tokens, ignore_eos=True
        )
        return (await answer.wait(STEP_S)).text

    return await asyncio.gather(*(one() for _ in range(number)))


async def test_the_first_token_comes_soon_after_a_cold_start(stack: Stack):
    times = []
    for _ in range(3):
        stack.close()
        began = time.monotonic()
        await stack.run("up", "--detach")
        over_http, over_amqp = await stack.first_tokens()
        times.append((over_http - began, over_amqp - began))
        print(f"first token: HTTP after {times[-1][0]:.1f} s, AMQP after {times[-1][1]:.1f} s")

    assert statistics.median(over_http for over_http, _ in times) <= FIRST_TOKEN_S


def test_images_are_small(images: dict[str, int]):
    sizes = {name: num_bytes / 1e6 for name, num_bytes in images.items()}
    print("sizes in MB:", {name: round(size) for name, size in sizes.items()})
    limits = {f"{image_name(target)}:{version()}": most for target, most in IMAGES.items()}

    assert {name for name, size in sizes.items() if size > limits[name]} == set()


async def test_containers_are_confined(up: Stack):
    own = {n: c for n, c in up.inspected().items() if not n.startswith("rabbitmq")}

    assert {container["Config"]["User"] for container in own.values()} == {"headway"}
    assert all(container["HostConfig"]["ReadonlyRootfs"] for container in own.values())
    assert {tuple(c["HostConfig"]["CapDrop"]) for c in own.values()} == {("ALL",)}
    written = subprocess.run(
        ["docker", "exec", own["gateway-1"]["Id"], "touch", "/home/headway/file"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Read-only file system" in written.stderr
    numbers = await up.run("exec", "-T", "gateway", "id", "-u")
    assert numbers.strip() == "10001"


async def test_the_demo_prints_a_table_of_the_classes(up: Stack):
    began = time.monotonic()
    printed = await up.run("run", "--rm", "-T", "demo", "demo", "--json")
    took_s = time.monotonic() - began
    report = json.loads(printed)
    print(f"demo: {took_s:.1f} s", *report["classes"], sep="\n")

    assert took_s <= DEMO_S
    assert [row["class"] for row in report["classes"]] == ["interactive", "deadline", "batch"]
    assert all(row["answered"] == row["requests"] > 0 for row in report["classes"])
    assert report["answer"]["text"].strip()


async def test_commands_for_operators_run_in_a_container(up: Stack):
    listed = json.loads(await up.run("run", "--rm", "-T", "headway", "top", "--json"))

    assert {each["instance_id"] for each in listed["instances"]} == {"agent-0", "agent-1"}


async def test_groupers_scale_while_requests_are_served(up: Stack):
    async with up.client() as client:
        answers = asyncio.create_task(all_answers(client, 30))
        await up.run("up", "--detach", "--wait", "--scale", "planner-grouper=3")
        assert len(await answers) == 30
        await up.healthy("planner-grouper", 3)
        assert len(await all_answers(client, 30)) == 30
    await up.run("up", "--detach", "--wait", "--scale", "planner-grouper=1")
    assert (await up.ask()).startswith("ok")


async def test_no_request_is_lost_when_an_agent_is_killed(up: Stack):
    async with up.client() as client:
        over_amqp = asyncio.create_task(all_answers(client, 30, max_tokens=200))
        over_http = [
            asyncio.create_task(up.ask(max_tokens=200, ignore_eos=True)) for _ in range(30)
        ]
        await asyncio.sleep(0.5)
        await up.run("kill", "agent-0")
        await up.run("up", "--detach", "agent-0")

        assert len(await over_amqp) == 30
        outcomes = await asyncio.gather(*over_http)
    assert [each for each in outcomes if not each.startswith("ok")] == []


async def test_no_request_is_lost_when_the_broker_restarts(up: Stack):
    async with up.client() as client:
        over_amqp = asyncio.create_task(all_answers(client, 50, max_tokens=200))
        over_http = [
            asyncio.create_task(up.ask(max_tokens=200, ignore_eos=True)) for _ in range(50)
        ]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await up.run("restart", "rabbitmq")
        print(f"broker restart: {time.monotonic() - began:.1f} s")
        during = [asyncio.create_task(up.ask()) for _ in range(10)]

        assert len(await over_amqp) == 50
        outcomes = await asyncio.gather(*over_http, *during)
    answered = [each for each in outcomes if each.startswith("ok")]
    refused = [each for each in outcomes if each.startswith(REFUSALS)]
    print(
        f"over HTTP: {len(answered)} answered, {len(refused)} refused: {sorted(set(refused))[:3]}"
    )
    assert len(answered) + len(refused) == 60
    assert answered
    async with asyncio.timeout(STEP_S):
        await up.first_tokens()


async def test_an_idle_mesh_stops_quickly_with_exit_code_0_and_serves_later_what_waited(up: Stack):
    ids = [f"waiting-{uuid4().hex[:8]}" for _ in range(5)]
    await up.run("stop", "agent-0", "agent-1")
    async with up.client() as client:
        for each in ids:
            await client.submit(
                idempotent=True, id=each, model="tiny-llama", prompt="hello", max_tokens=4
            )
        await asyncio.sleep(2.0)  # groupers move the requests into lanes

    began = time.monotonic()
    await up.run("stop")
    codes = {name: each["State"]["ExitCode"] for name, each in up.inspected().items()}
    await up.run("down")
    took_s = time.monotonic() - began
    print(f"down: {took_s:.1f} s, exit codes {set(codes.values())}")
    assert codes == dict.fromkeys(codes, 0)
    assert took_s <= DOWN_S

    await up.run("up", "--detach", "--wait")
    async with up.client() as client, asyncio.timeout(STEP_S):
        for each in ids:
            while (status := await client.status(each)).state is not RequestState.COMPLETED:
                await asyncio.sleep(0.5)
            assert status.final


def test_images_of_the_release_are_there_without_a_build(stack: Stack):
    services = json.loads(stack.compose("config", "--format", "json"))["services"]

    assert not any("build" in service for service in services.values())
    own = {s["image"] for s in services.values() if s["image"].startswith("headway")}
    assert own
    assert {image: image_bytes(image) for image in own if image_bytes(image) is None} == {}
