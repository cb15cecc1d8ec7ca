"""The gateway when clients disconnect, runs diverge, the broker is lost, or the gateway stops."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.control import RunStop, StopReason
from shared.contracts.telemetry import InstanceStatus, ModelState, Residency
from tests.brokers import BrokerRig, MemoryRig, eventually
from tests.integration.gateway_rig import GatewayRig, Request, http_client, running_gateway

BODY = {"model": "tiny-llama", "prompt": "hello"}


async def hang(request: Request) -> None:
    """Behave as a mesh that starts the run and then hangs."""
    await request.start()
    await request.tokens(0, "He")


def completions(rig: GatewayRig) -> str:
    return f"{rig.url}/v1/completions"


async def test_leaving_a_stream_cancels_the_request(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig:
        rig.mesh.script = hang
        async with (
            http_client() as http,
            http.stream("POST", completions(rig), json=BODY | {"stream": True}) as response,
        ):
            lines = response.aiter_lines()
            first = await anext(lines)

        await eventually(lambda: bool(rig.mesh.cancelled))
        await rig.mesh.requests[0].start("run2")
        await eventually(lambda: len(rig.mesh.controls) > 1)

    assert '"text":"He"' in first
    assert rig.mesh.cancelled == [rig.mesh.requests[0].body.id]
    stop = rig.mesh.controls[1]
    assert isinstance(stop, RunStop)
    assert (stop.run_id, stop.reason) == ("run2", StopReason.CANCELLED)
    assert (
        rig.sample("headway_gateway_requests_total", endpoint="completions", outcome="cancelled")
        == 1
    )
    assert rig.sample("headway_gateway_streams_open") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_cancels_the_request(
    broker_rig: BrokerRig, registry: Path, *, stream: bool
):
    async def ignore(_request: Request) -> None: ...

    async with running_gateway(broker_rig, registry) as rig:
        rig.mesh.script = ignore
        async with http_client() as http:
            asking = asyncio.create_task(
                http.post(completions(rig), json=BODY | {"stream": stream}), name="client"
            )
            await eventually(lambda: bool(rig.mesh.requests))
            asking.cancel()
            await asyncio.wait({asking})
        await eventually(lambda: bool(rig.mesh.cancelled))

    assert rig.mesh.cancelled == [rig.mesh.requests[0].body.id]


async def test_first_token_is_flushed_before_later_tokens(broker_rig: BrokerRig, registry: Path):
    finish = asyncio.Event()

    async def two_parts(request: Request) -> None:
        await hang(request)
        await finish.wait()
        await request.complete("He", "y")

    async with (
        running_gateway(broker_rig, registry) as rig,
        http_client() as http,
    ):
        rig.mesh.script = two_parts
        async with http.stream("POST", completions(rig), json=BODY | {"stream": True}) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            finish.set()
            rest = [line async for line in lines if line]

    assert '"text":"He"' in first
    assert '"text":"y"' in rest[0]
    assert rest[-1] == "data: [DONE]"
    assert response.headers["x-headway-request-id"] == rig.mesh.requests[0].body.id


async def test_diverging_replay_ends_the_stream_with_a_typed_error(
    broker_rig: BrokerRig, registry: Path
):
    async def disagree(request: Request) -> None:
        await request.start()
        await request.tokens(0, "He", "llo")
        await request.start("run2")
        await request.tokens(0, "Good", "bye", run="run2", first=50)

    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        rig.mesh.script = disagree
        response = await http.post(completions(rig), json=BODY | {"stream": True})
        await eventually(lambda: bool(rig.mesh.cancelled))

    last = response.text.strip().split("\n\n")[-1]
    assert '"code":"run_diverged"' in last
    assert "[DONE]" not in response.text
    assert (
        rig.sample("headway_gateway_requests_total", endpoint="completions", outcome="diverged")
        == 1
    )


async def test_tenant_at_its_limit_gets_a_retry_time(broker_rig: BrokerRig, registry: Path):
    async def ignore(_request: Request) -> None: ...

    async with (
        running_gateway(broker_rig, registry, max_outstanding_per_tenant=1) as rig,
        http_client() as http,
    ):
        rig.mesh.script = ignore
        asking = asyncio.create_task(http.post(completions(rig), json=BODY), name="client")
        await eventually(lambda: bool(rig.mesh.requests))
        refused = await http.post(completions(rig), json=BODY)
        await rig.mesh.requests[0].complete("ok")
        first = await asking

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert first.status_code == 200


async def test_client_timeout_is_honoured(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        rig.mesh.script = hang
        headers = {"X-Request-Timeout-Seconds": "0.05"}
        whole = await http.post(completions(rig), json=BODY, headers=headers)
        await eventually(lambda: len(rig.mesh.cancelled) == 1)

    assert (whole.status_code, whole.json()["error"]["type"]) == (504, "timeout_error")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_brokers: BrokerRig, registry: Path) -> AsyncIterator[GatewayRig]:
    """A gateway that refuses long bodies."""
    async with running_gateway(shared_brokers, registry, limits={"max_body_bytes": 1000}) as rig:
        yield rig


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"x" * 3_000_000, 413),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/nothing", b"{}", 404),
        ("GET", "/v1/models/none", None, 404),
    ],
)
async def test_every_error_has_openais_body(
    shared: GatewayRig, *, method: str, path: str, content: bytes | None, status: int
):
    async with http_client() as http:
        response = await http.request(
            method, shared.url + path, content=content, headers={"x-request-id": "mine"}
        )

    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_client_request_id_is_echoed(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        response = await http.post(completions(rig), json=BODY, headers={"x-request-id": "mine"})

    assert response.headers["x-request-id"] == "mine"


async def test_without_a_broker_the_gateway_is_not_ready_and_answers_503(registry: Path):
    brokers = MemoryRig()
    async with (
        running_gateway(brokers, registry, publish_timeout_s=0.1) as rig,
        http_client() as http,
    ):
        brokers.hub.stop()
        response = await http.post(completions(rig), json=BODY)
        await eventually(lambda: not rig.health.ready)
        ready = await http.get(f"{rig.url}/ready")
        brokers.hub.start()
        await eventually(lambda: rig.health.ready)
        again = await http.post(completions(rig), json=BODY)
    await brokers.close()

    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert response.json()["error"]["code"] == "mesh_unavailable"
    assert ready.status_code == 503
    assert again.status_code == 200


async def test_stop_lets_open_requests_finish_and_refuses_new_ones(
    broker_rig: BrokerRig, registry: Path
):
    async def ignore(_request: Request) -> None: ...

    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        rig.mesh.script = ignore
        asking = asyncio.create_task(http.post(completions(rig), json=BODY), name="client")
        await eventually(lambda: bool(rig.mesh.requests))
        rig.stop.set()
        refused = await http.post(completions(rig), json=BODY)
        ready = await http.get(f"{rig.url}/ready")
        await rig.mesh.requests[0].complete("ok")
        open_one = await asking

    assert refused.status_code == 503
    assert ready.status_code == 503
    assert open_one.status_code == 200


async def test_metrics_and_health_are_on_the_same_port(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        metrics = await http.get(f"{rig.url}/metrics")
        health = await http.get(f"{rig.url}/health")
        ready = await http.get(f"{rig.url}/ready")

    assert 'headway_gateway_requests_total{endpoint="chat",outcome="completed"} 0.0' in metrics.text
    assert (health.status_code, ready.status_code) == (200, 200)


async def test_ready_names_the_models_that_no_instance_can_serve_yet(registry: Path):
    """A mesh in memory: the gateway treats statuses equally with each broker."""
    async with (
        running_gateway(MemoryRig(), registry, ready_models=["tiny-llama", "tiny-qwen"]) as rig,
        http_client() as http,
    ):
        response = await http.get(f"{rig.url}/ready")
        assert response.status_code == 503
        assert response.json()["reasons"] == {
            "models": "no instance can serve tiny-llama, tiny-qwen yet"
        }
        status = InstanceStatus(
            instance_id=InstanceId("a"),
            incarnation="i",
            seq=1,
            at=1.0,
            engine="e",
            device="d",
            model=ModelName("tiny-llama"),
            models=tuple(
                ModelState(model=ModelName(name), residency=Residency.COLD)
                for name in ("tiny-llama", "tiny-qwen")
            ),
        )
        key = topology.status_key(InstanceId("a"))
        await rig.mesh.broker.publish(topology.TELEMETRY, key, OutMessage.transient(status))
        await eventually(lambda: rig.health.ready)
        assert (await http.get(f"{rig.url}/ready")).status_code == 200
