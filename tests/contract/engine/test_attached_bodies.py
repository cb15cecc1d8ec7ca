"""Requests that need vLLM at the agent, for a stock `vllm serve` that is reached in tokens."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ops.bench.vllm_serve import stock_server
from ops.engine_runs import generate
from services.agent.backends.base import EngineCall, EngineOutput, EngineRequest
from services.agent.backends.remote.backend import RemoteEngine
from services.agent.backends.remote.server import Server
from services.agent.backends.remote.token_host import TokenHost
from services.agent.backends.settings import RemoteSettings, VllmSettings
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.base import RequestId
from shared.contracts.errors import MeshError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Progress, Sampling, Tokens
from shared.contracts.telemetry import Capability
from tests.brokers import eventually
from tests.contract.engine.engines import LLAMA, EngineRig, prompt_of, tiny_entries
from tests.requirements import absent

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]
FLAGS = (
    *("--served-model-name", LLAMA, "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", "4096", "--block-size", "32", "--enable-prompt-tokens-details"),
    "--enable-scale-out",
)
CHAT = {
    "model": LLAMA,
    "messages": [{"role": "user", "content": "name three colours"}],
    "temperature": 0,
    "max_tokens": 12,
    "logprobs": True,
    "top_logprobs": 3,
}


class Attached(EngineRig):
    """An engine of a server of others, and the server."""

    url: str
    host: TokenHost

    async def outputs(self, request: EngineRequest) -> list[EngineOutput]:
        async with asyncio.timeout(60):
            return [output async for output in generate(self.engine, request)]

    async def tokens(self, request: EngineRequest) -> Tokens:
        return tuple(token for each in await self.outputs(request) for token in each.token_ids)

    def completion(self, prompt: Tokens, progress: Tokens = (), **fields: Any) -> EngineRequest:
        """A body with the prompt, whose answer continues after *progress*."""
        body = {"model": LLAMA, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
        call = EngineCall(
            endpoint="/v1/completions",
            body=json.dumps(body | {"temperature": 0.0} | fields).encode(),
            seed=1,
            children=(Progress(token_ids=progress),) if progress else (),
        )
        return replace(self.request((), Sampling()), call=call)

    def call(self, body: dict[str, Any]) -> EngineRequest:
        call = EngineCall(endpoint="/v1/chat/completions", body=json.dumps(body).encode(), seed=1)
        return replace(self.request((), Sampling()), call=call)


@dataclass(frozen=True, slots=True)
class Served:
    """A server with both APIs for tokens, and the engine host of the agent."""

    url: str
    entry: ModelEntry
    host: TokenHost


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    if (reason := vllm_unavailable_reason()) is not None:
        absent(reason, "vllm")
    directory: Path = tmp_path_factory.mktemp("attached")
    (entry,) = (each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    host = TokenHost(VllmSettings(log_path=str(directory / "host.log")))
    async with stock_server(("--model", entry.path, *FLAGS), directory / "serve.log") as server:
        yield Served(server.url, entry, host)
        await host.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["completions", "generate"])
async def rig(request: pytest.FixtureRequest, served: Served) -> AsyncIterator[Attached]:
    """An engine of the server, which hides one of its APIs from some engines."""
    engine = RemoteEngine([served.entry], RemoteSettings(url=served.url), served.host)

    async def kill() -> None:
        pytest.fail("the end-to-end test kills servers")

    made = Attached(engine, kill, (served.entry,))
    made.url, made.host = served.url, served.host
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "completions":
            patch.setattr(Server, "generates", _hidden)
        await made.bring_up()
    yield made
    await engine.close()


async def _hidden(_server: Server, _model: str) -> bool:
    return False


async def test_instance_with_an_engine_host_takes_bodies(rig: Attached) -> None:
    assert Capability.CALLS in rig.engine.identity.capabilities


async def test_call_is_answered_as_by_the_server_itself(rig: Attached) -> None:
    outputs = await rig.outputs(rig.call(CHAT))
    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as client:
        direct = (await client.post("/v1/chat/completions", json=CHAT)).json()
    found = json.loads(outputs[-1].response or b"")

    assert found["choices"] == direct["choices"]
    assert found["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]


async def test_call_that_vllm_refuses_names_its_field(rig: Attached) -> None:
    with pytest.raises(MeshError, match="temperature"):
        await rig.outputs(rig.call(CHAT | {"temperature": -1}))


async def test_answer_has_the_log_probabilities_that_the_body_asks_for(rig: Attached) -> None:
    outputs = await rig.outputs(rig.completion(prompt_of(30), logprobs=2))
    steps = [step for output in outputs for step in output.details]

    assert sum(step.num_tokens for step in steps) == 16
    assert sum(len(output.token_ids) for output in outputs) == 16


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "seed": 7}, {"frequency_penalty": 0.7}]
)
async def test_cut_answer_continues_with_equal_tokens(
    rig: Attached, params: dict[str, Any]
) -> None:
    prompt = prompt_of(70, first=5)
    whole = await rig.tokens(rig.completion(prompt, **params))
    rest = await rig.tokens(rig.completion(prompt, whole[:9], **params))

    assert whole == whole[:9] + rest


async def test_stop_string_ends_an_answer(rig: Attached) -> None:
    body = CHAT | {"logprobs": False, "top_logprobs": None}
    whole = json.loads((await rig.outputs(rig.call(body)))[-1].response or b"")
    text = whole["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:2]
    cut = json.loads((await rig.outputs(rig.call(body | {"stop": [stop]})))[-1].response or b"")

    assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


async def test_what_no_stream_carries_is_refused_by_name(rig: Attached) -> None:
    with pytest.raises(MeshError, match="prompt_logprobs"):
        await rig.outputs(rig.completion(prompt_of(8), prompt_logprobs=1))


@pytest.mark.parametrize("rig", ["generate"], indirect=True)
async def test_generate_api_carries_arguments_of_plugins(rig: Attached) -> None:
    assert len(await rig.tokens(rig.completion(prompt_of(8), vllm_xargs={"plugin": 1}))) == 16


@pytest.mark.parametrize("rig", ["completions"], indirect=True)
async def test_completions_api_refuses_arguments_of_plugins_by_name(rig: Attached) -> None:
    with pytest.raises(MeshError, match=r"extra_args.*enable-scale-out"):
        await rig.outputs(rig.completion(prompt_of(8), vllm_xargs={"plugin": 1}))


async def test_aborted_run_ends_at_the_server(rig: Attached) -> None:
    request = rig.completion(prompt_of(8), max_tokens=3000)
    async with httpx.AsyncClient(base_url=rig.url) as client:

        async def measured(name: str) -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            (line,) = (each for each in lines if each.startswith(f"vllm:{name}{{"))
            return float(line.rpartition(" ")[2])

        async def are_running(number: int) -> bool:
            return await measured("num_requests_running") == number

        before = await measured("generation_tokens_total")
        answer = asyncio.create_task(rig.outputs(replace(request, request_id=RequestId("long"))))
        await eventually(lambda: are_running(1))
        rig.engine.abort(RequestId("long"))
        await asyncio.wait({answer})
        await eventually(lambda: are_running(0))

        # A run that continues at the server also ends, but with all of its tokens.
        assert await measured("generation_tokens_total") - before < 3000


@pytest.mark.parametrize("rig", ["generate"], indirect=True)
async def test_engine_host_that_dies_is_started_again(rig: Attached) -> None:
    """Keep this test the last one of the module: other tests would find no host for seconds."""
    request = rig.completion(prompt_of(8), max_tokens=3000)
    answer = asyncio.create_task(rig.outputs(request))
    await eventually(lambda: rig.engine.snapshot().running == 1)
    assert rig.host.pid is not None
    os.killpg(rig.host.pid, signal.SIGKILL)
    with pytest.raises(MeshError, match="engine host ended"):
        await answer

    assert rig.engine.alive
    await eventually(lambda: rig.host.pid is not None, within_s=300)
    assert len(await rig.tokens(rig.completion(prompt_of(8)))) == 16
