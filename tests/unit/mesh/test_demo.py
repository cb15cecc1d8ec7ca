"""`headway demo`: figures of the classes, and streamed answers of a gateway."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ops.ports import free_port
from services.mesh.cli import main
from services.mesh.demo import http
from services.mesh.demo.classes import CLASSES, Asked, PromptForm, figures, is_attained, quantile
from services.mesh.demo.cli import show
from services.mesh.demo.http import Gateway, NotServedError
from services.mesh.demo.load import usable_models
from services.mesh.verbs.options import gateway_address
from shared.contracts.errors import SettingsError
from shared.runtime.health import serve_http

INTERACTIVE, DEADLINE, BATCH = CLASSES


def asked(name: str, first_s: float | None, whole_s: float | None) -> Asked:
    return Asked(name=name, model="m", prompt="p", first_s=first_s, whole_s=whole_s)


@pytest.mark.parametrize(
    ("first_s", "whole_s", "attained"),
    [(2.0, 60.0, (True, False, True)), (2.1, 30.0, (False, True, True)), (1.0, None, (False,) * 3)],
)
def test_an_answer_attains_the_target_of_its_class(
    first_s: float, whole_s: float | None, attained: tuple[bool, bool, bool]
):
    answers = [asked(each.name, first_s, whole_s) for each in CLASSES]

    assert tuple(map(is_attained, answers, CLASSES)) == attained


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.95, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([1.0] * 19 + [9.0], 0.95, 1.0),
    ],
)
def test_a_quantile_is_one_of_the_values(values: list[float], share: float, expected: float | None):
    assert quantile(values, share) == expected


def test_figures_count_requests_without_an_answer():
    failed = Asked(name="batch", model="m", prompt="p", error="refused")
    row = figures([asked("batch", 1.0, 2.0), failed, asked("deadline", 1.0, 2.0)], BATCH)

    assert (row["requests"], row["answered"], row["attained"]) == (2, 1, 1)
    assert row["e2e_s"] == {"p50": 2.0, "p95": 2.0}
    assert row["errors"] == ["refused"]


def test_the_table_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]):
    answers = [asked(each.name, 12.34, 45.67) for each in CLASSES]
    show([figures(answers, each) for each in CLASSES], answers[0])
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.strip().startswith("interactive ")]
    assert "12.34 / 12.34" in row
    assert "45.67 / 45.67" in row


async def models(_: Request) -> Response:
    names = [("chatty", None), ("adapter", "chatty"), ("plain", None), ("vectors", None)]
    return JSONResponse({"data": [{"id": name, "parent": base} for name, base in names]})


async def chat(request: Request) -> Response:
    """Streams an answer of the model `chatty`, and refuses the others."""
    body = await request.json()
    if body["model"] != "chatty":
        return JSONResponse({"error": {"message": "no chat template"}}, status_code=400)
    assert body["slo"] == INTERACTIVE.slo
    lines = [
        ": comment",
        'data: {"choices": [{"delta": {"role": "assistant"}}]}',
        'data: {"choices": [{"delta": {"content": "two "}}]}',
        'data: {"choices": [{"delta": {"content": "words"}}]}',
        'data: {"choices": []}',
        "data: [DONE]",
    ]
    return StreamingResponse(iter("\n\n".join(lines)), media_type="text/event-stream")


async def completion(request: Request) -> Response:
    """Streams an answer of `plain`, and an error of the other models."""
    error = 'data: {"error": {"message": "makes no text"}}\n\n'
    text = 'data: {"choices": [{"text": "text"}]}\n\n'
    is_plain = (await request.json())["model"] == "plain"
    return StreamingResponse(iter([text if is_plain else error]), media_type="text/event-stream")


@asynccontextmanager
async def gateway() -> AsyncIterator[Gateway]:
    routes = [
        Route("/v1/models", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
    ]
    port = free_port()
    async with (
        serve_http(Starlette(routes=routes), host="127.0.0.1", port=port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield Gateway(session)


async def test_each_model_is_asked_in_the_form_that_it_takes():
    lines: list[str] = []
    async with gateway() as opened:
        names = await opened.models(within_s=5.0)
        usable = await usable_models(opened, names, within_s=5.0, say=lines.append)
        answer = await opened.ask(INTERACTIVE, "chatty", "a question", PromptForm.CHAT)

    assert names == ("chatty", "plain", "vectors")
    assert usable == {"chatty": PromptForm.CHAT, "plain": PromptForm.TEXT}
    assert "vectors is left out" in lines[-1]
    assert "makes no text" in lines[-1]
    assert answer.text == "two words"
    assert answer.first_s is not None
    assert answer.whole_s is not None
    assert answer.first_s <= answer.whole_s


async def test_an_error_in_a_stream_and_a_mesh_without_text_are_refused():
    async with gateway() as opened:
        with pytest.raises(NotServedError, match="makes no text"):
            await opened.ask(BATCH, "vectors", "a question", PromptForm.TEXT)
        with pytest.raises(SettingsError, match="no model answers; the last reason: vectors"):
            await usable_models(opened, ["vectors"], within_s=5.0, say=print)


async def test_a_gateway_that_does_not_answer_is_named_with_what_to_do():
    async with aiohttp.ClientSession(f"http://127.0.0.1:{free_port()}") as session:
        with pytest.raises(SettingsError, match="start the mesh with `docker compose up`"):
            await Gateway(session).models(within_s=0.01)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_is_named_at_once(status: int):
    async def refuse(_request: Request) -> Response:
        return Response("wrong key", status_code=status)

    port = free_port()
    async with (
        serve_http(Starlette(routes=[Route("/v1/models", refuse)]), host="127.0.0.1", port=port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        asyncio.timeout(30.0),
    ):
        with pytest.raises(SettingsError, match=f"HEADWAY_API_KEY is not accepted.*{status}"):
            await Gateway(session).models(within_s=3600.0)


async def test_a_stream_that_cannot_be_read_is_an_error_of_its_request():
    async def garbled(_request: Request) -> Response:
        return Response('data: {"choices": 1}\n\n', media_type="text/event-stream")

    port = free_port()
    routes = [Route("/v1/completions", garbled, methods=["POST"])]
    async with (
        serve_http(Starlette(routes=routes), host="127.0.0.1", port=port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        with pytest.raises(NotServedError, match="cannot be read"):
            await Gateway(session).ask(BATCH, "plain", "a question", PromptForm.TEXT)


def test_a_length_of_the_load_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--seconds", "601"]) == 2
    assert "--seconds: 601 must be from 1 to 600" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "//host/v1", "http://", "http://host:none"])
def test_an_address_that_is_not_http_is_refused(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--url", url]) == 2
    assert f"--url is {url!r}" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("prefix", ["", "/behind/a/proxy"])
async def test_a_gateway_is_reached_by_each_form_of_its_address(prefix: str, path: str):
    port = free_port()
    routes = [Route(f"{prefix}/v1/models", models)]
    address = gateway_address(f"http://127.0.0.1:{port}{prefix}{path}")
    async with (
        serve_http(Starlette(routes=routes), host="127.0.0.1", port=port),
        aiohttp.ClientSession(address) as session,
    ):
        assert "chatty" in await Gateway(session).models(within_s=5.0)


async def listed_never(request: Request) -> Response:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return JSONResponse({"data": []})


async def listed_otherwise(_: Request) -> Response:
    return JSONResponse({"models": []})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(listed_never, "no answer in time"), (listed_otherwise, "cannot be read")],
)
async def test_a_server_that_lists_no_models_is_named_with_the_reason(
    answer: Callable[[Request], Awaitable[Response]],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http, "_LIST_TIMEOUT_S", 0.1)
    port = free_port()
    async with (
        serve_http(Starlette(routes=[Route("/v1/models", answer)]), host="127.0.0.1", port=port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        asyncio.timeout(30.0),
    ):
        with pytest.raises(SettingsError, match=f"has not answered.*{reason}"):
            await Gateway(session).models(within_s=0.2)


def test_targets_of_the_classes_are_described():
    assert [each.target for each in CLASSES] == [
        "first token in 2 s",
        "whole answer in 30 s",
        "none",
    ]
    assert DEADLINE.slo == {"ttlt_s": 30.0}
