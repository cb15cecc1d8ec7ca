"""Endpoints of a service of Kubernetes, from a small server that speaks list and watch."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ops.ports import free_port
from services.agent.attached import endpoint_slices
from services.agent.attached.endpoint_slices import ClusterApi, EndpointSlices, service_of
from services.agent.attached.endpoints import endpoints_of
from services.agent.backends.settings import RemoteSettings
from shared.contracts.errors import EngineError, SettingsError
from shared.runtime.health import serve_http
from tests.brokers import eventually

RECORDED = """
{"metadata":{"name":"chat-x7k2p","generateName":"chat-","namespace":"models","uid":"8f3c","generation":3,
"resourceVersion":"%s","labels":{"endpointslice.kubernetes.io/managed-by":"endpointslice-controller.k8s.io",
"kubernetes.io/service-name":"chat"}},"addressType":"IPv4","endpoints":[
{"addresses":["10.244.1.7"],"conditions":{"ready":true,"serving":true,"terminating":false},
"nodeName":"gpu-1","targetRef":{"kind":"Pod","namespace":"models","name":"chat-0"}},
{"addresses":["10.244.2.9"],"conditions":{"ready":false,"serving":false,"terminating":false},
"nodeName":"gpu-2","targetRef":{"kind":"Pod","namespace":"models","name":"chat-1"}}],
"ports":[{"name":"http","port":8000,"protocol":"TCP"},{"name":"metrics","port":9000,"protocol":"TCP"}]}
"""
"""An EndpointSlice as the API of a cluster returns it; its version is missing."""


def recorded(version: int, *ready: bool, name: str = "chat-x7k2p") -> dict[str, Any]:
    """The recorded slice with another version, and with the readiness of its endpoints."""
    each: dict[str, Any] = json.loads(RECORDED % version)
    each["metadata"]["name"] = name
    for endpoint, is_ready in zip(each["endpoints"], ready, strict=False):
        endpoint["conditions"]["ready"] = is_ready
    return each


class Cluster:
    """The API: lists slices, and sends the events that the test adds."""

    def __init__(self) -> None:
        self.slices = [recorded(10, True, False)]
        self.version = "10"
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """None ends the watch."""
        self.requests: list[dict[str, str]] = []
        self.authorizations: list[str | None] = []
        self.status = 200

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        path = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        application = Starlette(routes=[Route(path, self._answer)])
        port = free_port()
        async with serve_http(application, host="127.0.0.1", port=port):
            yield f"http://127.0.0.1:{port}"

    def watches(self) -> list[str]:
        """Versions at which watches began."""
        return [each["resourceVersion"] for each in self.requests if "watch" in each]

    def lists(self) -> int:
        return sum("watch" not in each for each in self.requests)

    async def _answer(self, request: Request) -> Response:
        self.requests.append(dict(request.query_params))
        self.authorizations.append(request.headers.get("authorization"))
        if self.status != 200:
            return JSONResponse({"kind": "Status", "message": "forbidden"}, status_code=self.status)
        if "watch" in request.query_params:
            return StreamingResponse(self._events(), media_type="application/json")
        return JSONResponse(
            {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": self.version},
                "items": self.slices,
            }
        )

    async def _events(self) -> AsyncIterator[bytes]:
        while (event := await self.events.get()) is not None:
            yield json.dumps(event).encode() + b"\n"


@asynccontextmanager
async def watching(
    cluster: Cluster, url: str = "kubernetes://models/chat?port=http", token: Path | None = None
) -> AsyncIterator[EndpointSlices]:
    async with cluster.serving() as api:
        settings = RemoteSettings(url=url, max_running=7)
        endpoints = EndpointSlices(service_of(url), ClusterApi(url=api, token_file=token), settings)
        try:
            yield endpoints
        finally:
            cluster.events.put_nowait(None)
            await endpoints.close()


async def urls(endpoints: EndpointSlices) -> list[str]:
    return [each.url for each in await endpoints.now()]


async def become(endpoints: EndpointSlices, *expected: str) -> None:
    async def equal() -> bool:
        return await urls(endpoints) == list(expected)

    await eventually(equal)


FIRST, SECOND = "http://10.244.1.7:8000", "http://10.244.2.9:8000"


async def test_ready_endpoints_follow_the_watch(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abc\n")
    cluster = Cluster()
    async with watching(cluster, token=token) as endpoints:
        assert await urls(endpoints) == [FIRST]
        assert (await endpoints.now())[0].max_running == 7
        cluster.events.put_nowait({"type": "MODIFIED", "object": recorded(11, True, True)})
        await become(endpoints, FIRST, SECOND)
        cluster.events.put_nowait({"type": "MODIFIED", "object": recorded(12, False, True)})
        await become(endpoints, SECOND)
        cluster.events.put_nowait({"type": "DELETED", "object": recorded(13)})
        await become(endpoints)
        cluster.events.put_nowait({"type": "ADDED", "object": recorded(14, True, False)})
        await become(endpoints, FIRST)

    assert cluster.requests[0] == {"labelSelector": "kubernetes.io/service-name=chat"}
    assert set(cluster.authorizations) == {"Bearer abc"}


async def test_slice_may_have_a_thousand_endpoints() -> None:
    """The most that the controller of Kubernetes can put into one slice, with the longest names."""
    cluster = Cluster()
    large, name = recorded(11), "n" * 253
    endpoint = large["endpoints"][0] | {"nodeName": name}
    endpoint["targetRef"] |= {"name": name}
    large["endpoints"] = [
        endpoint | {"addresses": [f"10.0.{number // 250}.{number % 250}"]} for number in range(1000)
    ]
    async with watching(cluster) as endpoints:
        await endpoints.now()
        cluster.events.put_nowait({"type": "MODIFIED", "object": large})

        async def has_all() -> bool:
            return len(await urls(endpoints)) == 1000

        await eventually(has_all)


async def test_watch_that_ends_begins_again_at_its_last_version() -> None:
    cluster = Cluster()
    async with watching(cluster) as endpoints:
        await endpoints.now()
        bookmark = {"metadata": {"resourceVersion": "99", "name": ""}}
        cluster.events.put_nowait({"type": "BOOKMARK", "object": bookmark})
        cluster.events.put_nowait(None)  # the connection ends

        async def again() -> bool:
            return cluster.watches() == ["10", "99"]

        await eventually(again)
        assert await urls(endpoints) == [FIRST]
    assert cluster.lists() == 1


async def test_version_that_the_api_has_forgotten_leads_to_a_new_list() -> None:
    cluster = Cluster()
    async with watching(cluster) as endpoints:
        await endpoints.now()
        cluster.slices, cluster.version = [recorded(200, False, True)], "200"
        expired = {"kind": "Status", "code": 410, "message": "too old resource version: 10 (200)"}
        cluster.events.put_nowait({"type": "ERROR", "object": expired})
        await become(endpoints, SECOND)

    assert cluster.lists() == 2
    assert cluster.watches()[-1] == "200"


async def test_api_that_refuses_is_named_and_known_endpoints_count_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_slices, "RETRY_S", 0.05)
    cluster = Cluster()
    async with watching(cluster) as endpoints:
        cluster.status = 403
        with pytest.raises(EngineError, match=r"answers 403: .*forbidden"):
            await endpoints.now()
        cluster.status = 200
        await become(endpoints, FIRST)
        cluster.status = 500
        cluster.events.put_nowait(None)

        async def refused() -> bool:
            return len(cluster.watches()) > 2

        await eventually(refused)
        assert await urls(endpoints) == [FIRST]
        cluster.status = 200
        cluster.events.put_nowait({"type": "MODIFIED", "object": recorded(11, True, True)})
        await become(endpoints, FIRST, SECOND)


async def test_bug_in_the_watch_is_raised_where_the_endpoints_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(_slices: EndpointSlices) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(EndpointSlices, "_changes", broken)
    async with watching(Cluster()) as endpoints:
        assert await urls(endpoints) == [FIRST]
        await asyncio.sleep(0)  # the watch begins
        with pytest.raises(ZeroDivisionError):
            await endpoints.now()


@pytest.mark.parametrize(("port", "found"), [("http", True), ("9000", True), ("grpc", False)])
async def test_port_is_selected_by_name_or_number(port: str, found: bool) -> None:  # noqa: FBT001 - a parameter of the test
    async with watching(Cluster(), f"kubernetes://models/chat?port={port}") as endpoints:
        assert bool(await urls(endpoints)) is found


def test_labels_select_slices_of_several_services() -> None:
    service = service_of("kubernetes://models/?selector=app%3Dchat,tier!%3Dtest&port=http")

    assert (service.namespace, service.selector) == ("models", "app=chat,tier!=test")


@pytest.mark.parametrize("url", ["kubernetes://", "kubernetes://models", "kubernetes://models/"])
def test_service_without_a_name_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="kubernetes://NAMESPACE/SERVICE"):
        service_of(url)


def test_outside_a_pod_the_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match="KUBERNETES_SERVICE_HOST is not set"):
        endpoints_of(RemoteSettings(url="kubernetes://models/chat"))
