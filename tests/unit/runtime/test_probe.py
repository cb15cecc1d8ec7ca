"""The health check of containers."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ops.ports import free_port
from shared.runtime.health import serve_http
from shared.runtime.probe import main, problem


@pytest.mark.parametrize(
    ("status", "expected"), [(200, None), (503, "status 503: the broker is away")]
)
async def test_a_service_is_ready_if_it_says_so(status: int, expected: str | None):
    async def ready(_: Request) -> PlainTextResponse:
        return PlainTextResponse("the broker is away", status_code=status)

    port = free_port()
    app = Starlette(routes=[Route("/ready", ready)])
    async with serve_http(app, host="127.0.0.1", port=port):
        found = await asyncio.to_thread(problem, port)
        code = await asyncio.to_thread(main, [str(port)])

    assert found == expected
    assert code == (expected is not None)


def test_a_service_that_does_not_answer_is_not_ready(capsys: pytest.CaptureFixture[str]):
    port = free_port()

    assert main([str(port)]) == 1
    assert f"no answer from port {port}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["ready"], ["1", "2"]])
def test_a_port_is_necessary(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert "PORT" in capsys.readouterr().err
