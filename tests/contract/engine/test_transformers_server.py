"""The engine contract for `transformers serve`, a server of another make, with bodies."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ops.engine_runs import generate
from ops.ports import free_port
from services.agent.backends.base import EngineCall, EngineOutput, EngineRequest
from services.agent.backends.remote.backend import RemoteEngine
from services.agent.backends.remote.server import Server
from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import ContractError, EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import UNKNOWN_TOKEN, FinishReason, Progress, Sampling
from shared.contracts.telemetry import Capability
from tests.contract.engine.engines import LLAMA, tiny_entries
from tests.requirements import absent

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]
MODEL = ModelName("chat")
START_S = 120.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello there"}]
BROKEN = "\N{REPLACEMENT CHARACTER}"
_ids = count()


@asynccontextmanager
async def transformers_serve(model: Path, directory: Path) -> AsyncIterator[tuple[str, int]]:
    """Context with a running `transformers serve`; its address and process."""
    port = free_port()
    (directory / "hub").mkdir()
    with (directory / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
            env=os.environ
            | {"HF_HUB_CACHE": str(directory / "hub"), "HF_HUB_OFFLINE": "1"}
            | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    server = Server(RemoteSettings(url=url))
    try:
        async with asyncio.timeout(START_S):
            while not await server.alive():
                if process.returncode is not None:
                    pytest.fail((directory / "serve.log").read_text()[-2000:])
                await asyncio.sleep(0.2)
        yield url, process.pid
    finally:
        await server.close()
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


class Rig:
    """A running server and an engine for it."""

    def __init__(self, engine: RemoteEngine, pid: int) -> None:
        self.engine = engine
        self.pid = pid

    async def ask(self, endpoint: str = CHAT, **fields: Any) -> list[EngineOutput]:
        return [each async for each in generate(self.engine, request(endpoint, **fields))]


def request(
    endpoint: str = CHAT,
    *,
    streams: bool = True,
    children: tuple[Progress, ...] = (),
    **fields: Any,
) -> EngineRequest:
    prompt = {"messages": HELLO} if endpoint == CHAT else {"prompt": "hello there"}
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0} | prompt | fields
    return EngineRequest(
        request_id=RequestId(f"r{next(_ids)}"),
        model=MODEL,
        prompt=(),
        sampling=Sampling(),
        call=EngineCall(
            endpoint=endpoint,
            body=json.dumps(body).encode(),
            streams=streams,
            seed=1,
            children=children,
        ),
    )


def text_of(outputs: Sequence[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    if find_spec("accelerate") is None:
        absent("accelerate is not installed, without which `transformers serve` loads no model")
    directory = tmp_path_factory.mktemp("transformers")
    (entry,) = (each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    async with transformers_serve(Path(entry.path), directory) as (url, pid):
        taken = ModelEntry(name=MODEL, takes="bodies", max_model_len=1024)
        # The server lists no models; its name of the model is the directory.
        engine = RemoteEngine([taken], RemoteSettings(url=url, model=entry.path, max_running=4))
        await engine.start()
        await engine.activate(MODEL)
        yield Rig(engine, pid)
        await engine.close()


async def test_server_of_another_make_is_recognized(rig: Rig) -> None:
    assert rig.engine.identity.engine == "openai-server"
    assert rig.engine.identity.capabilities == {Capability.CALLS}
    assert 1 <= rig.engine.snapshot().max_running <= 4


@pytest.mark.parametrize("endpoint", [CHAT, TEXT])
async def test_streamed_answer_equals_the_whole_one(rig: Rig, endpoint: str) -> None:
    streamed = await rig.ask(endpoint)
    whole = await rig.ask(endpoint, streams=False)

    # The server adds a replacement character to whole answers that end inside a character.
    assert text_of(streamed).rstrip(BROKEN) == text_of(whole).rstrip(BROKEN) != ""
    assert streamed[-2].finish_reason is whole[-2].finish_reason is FinishReason.LENGTH
    for outputs in (streamed, whole):
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == [UNKNOWN_TOKEN] * 12
        assert outputs[-2].prompt_tokens > 0
    message = json.loads(streamed[-1].response or b"")["choices"][0]
    assert (message.get("message") or {}).get("content", message.get("text")) == text_of(streamed)


async def test_stop_string_ends_the_answer(rig: Rig) -> None:
    whole, words, messages = "", [], HELLO
    for number in range(20):  # until an answer has a word, which another text follows
        messages = [{"role": "user", "content": f"question {number}"}]
        whole = text_of(await rig.ask(messages=messages))
        if words := re.findall(r"[a-z]{2,}", whole[:-4]):
            break
    stopped = await rig.ask(messages=messages, stop=[words[-1]])

    assert len(text_of(stopped)) < len(whole)
    assert stopped[-2].finish_reason is FinishReason.STOP


async def test_concurrent_answers_equal_single_ones(rig: Rig) -> None:
    prompts = [[{"role": "user", "content": f"question {n}"}] for n in range(3)]
    alone = [text_of(await rig.ask(messages=each)) for each in prompts]
    together = await asyncio.gather(*(rig.ask(messages=each) for each in prompts))

    assert [text_of(outputs) for outputs in together] == alone


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"n": 2}, {"logprobs": True}, {"priority": 1}],
)
async def test_fields_that_the_server_would_ignore_are_refused_by_name(
    rig: Rig, fields: dict[str, Any]
) -> None:
    (name,) = fields
    with pytest.raises(ContractError, match=f"do not support {name}") as refused:
        await rig.ask(**fields)

    assert refused.value.param == name


async def test_refusal_of_the_server_is_the_clients(rig: Rig) -> None:
    with pytest.raises(ContractError) as refused:
        await rig.ask(TEXT, prompt=[1, 2, 3])

    assert 400 <= refused.value.status < 500
    assert len(text_of(await rig.ask())) > 0


async def test_another_answer_comes_after_an_abort(rig: Rig) -> None:
    """The server computes one answer at a time."""
    outputs = generate(rig.engine, request(max_tokens=900))
    await anext(outputs)
    await outputs.aclose()  # type: ignore[attr-defined]  # a generator

    async with asyncio.timeout(30):
        assert len(text_of(await rig.ask(max_tokens=3))) > 0
    assert rig.engine.snapshot().running == 0


async def test_resumed_answer_leaves_out_what_was_sent(rig: Rig) -> None:
    whole = await rig.ask()
    sent = [output for output in whole[:4] if output.token_ids]
    progress = Progress(
        token_ids=tuple(token for output in sent for token in output.token_ids),
        details=tuple(step for output in sent for step in output.details),
    )
    rest = await rig.ask(children=(progress,))

    assert text_of(rest) == text_of(whole)
    assert len(progress.token_ids) + sum(len(each.token_ids) for each in rest) == 12


async def test_killed_server_ends_all_runs(rig: Rig) -> None:
    """The last test of this file: it ends the server."""
    begun = asyncio.Event()

    async def run(number: int) -> None:
        """One of several runs, which the server computes one after another."""
        messages = [{"role": "user", "content": f"question {number}"}]
        async for _ in generate(rig.engine, request(max_tokens=200, messages=messages)):
            begun.set()

    running = [asyncio.create_task(run(number)) for number in range(6)]
    await begun.wait()
    os.kill(rig.pid, signal.SIGKILL)
    ends = await asyncio.gather(*running, return_exceptions=True)

    assert any(isinstance(end, EngineError) and end.engine_dead for end in ends)
    assert not rig.engine.alive
