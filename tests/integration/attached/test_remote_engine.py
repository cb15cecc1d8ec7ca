"""The backend for servers of others, against a server that the test can break."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from ops.engine_runs import generate
from ops.ports import free_port
from services.agent.backends.base import (
    EngineCall,
    EngineEvent,
    EngineLost,
    EngineOutput,
    EngineRequest,
    NewOutput,
    RunEnded,
)
from services.agent.backends.remote.backend import RemoteEngine
from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import ContractError, EngineError, NotActiveError, UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import (
    UNKNOWN_TOKEN,
    FinishReason,
    Progress,
    Sampling,
    Tokens,
)
from shared.contracts.telemetry import Capability
from tests.agents.openai_server import OpenAiServer
from tests.brokers import eventually

MODEL = ModelName("m")
BODIES = ModelEntry(name=MODEL, takes="bodies", max_model_len=512)
TOKENS = ModelEntry(name=MODEL, path="none", max_model_len=512)
GREEDY = Sampling(max_tokens=10, temperature=0, ignore_eos=True)
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def attached(
    server: OpenAiServer, entry: ModelEntry = BODIES, *, port: int | None = None, **settings: Any
) -> AsyncIterator[RemoteEngine]:
    """Context with a started engine of a running server."""
    async with server.serving(port) as url:
        engine = RemoteEngine([entry], RemoteSettings(**({"url": url} | settings)))
        try:
            await engine.start()
            await engine.activate(MODEL)
            yield engine
        finally:
            await engine.close()


def tokens_request(sampling: Sampling = GREEDY, **fields: Any) -> EngineRequest:
    values: dict[str, Any] = {"request_id": RequestId("r"), "model": MODEL, "prompt": (1, 2, 3)}
    return EngineRequest(sampling=sampling, **(values | fields))


def body_request(
    *, streams: bool = True, children: tuple[Progress, ...] = (), **body: Any
) -> EngineRequest:
    whole = {"model": "name in the mesh", "messages": ["hi"], "max_tokens": 5} | body
    call = EngineCall(
        endpoint=CHAT, body=json.dumps(whole).encode(), streams=streams, seed=1, children=children
    )
    return EngineRequest(
        request_id=RequestId("r"), model=MODEL, prompt=(), sampling=Sampling(), call=call
    )


async def outputs_of(engine: RemoteEngine, request: EngineRequest) -> list[EngineOutput]:
    async with asyncio.timeout(10):
        return [output async for output in generate(engine, request)]


def tokens_in(outputs: Sequence[EngineOutput]) -> Tokens:
    return tuple(token for output in outputs for token in output.token_ids)


def events_in(outputs: Sequence[EngineOutput]) -> list[bytes]:
    """Events that a client gets: those of the chunks, then those of the final."""
    streamed = [step for output in outputs[:-1] for step in output.details]
    rest = outputs[-1].details[len(streamed) :]
    steps = (*streamed, *rest)
    return [event for step in steps for event in step.events.split(b"\n\n") if event]


async def test_answer_in_tokens_is_the_servers() -> None:
    server = OpenAiServer()
    async with attached(server, TOKENS) as engine:
        outputs = await outputs_of(engine, tokens_request())

    assert len(tokens_in(outputs)) == 10
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert server.bodies[-1]["prompt"] == [1, 2, 3]


async def test_greedy_answer_continues_after_its_progress() -> None:
    server = OpenAiServer()
    async with attached(server, TOKENS) as engine:
        whole = tokens_in(await outputs_of(engine, tokens_request()))
        rest = await outputs_of(engine, tokens_request(progress=whole[:4]))

    assert whole[:4] + tokens_in(rest) == whole
    assert server.bodies[-1]["prompt"] == [1, 2, 3, *whole[:4]]
    assert server.bodies[-1]["max_tokens"] == 6


async def test_random_answer_begins_again_without_the_known_tokens() -> None:
    random = Sampling(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True)
    server = OpenAiServer()
    async with attached(server, TOKENS) as engine:
        whole = tokens_in(await outputs_of(engine, tokens_request(random)))
        rest = await outputs_of(engine, tokens_request(random, progress=whole[:4]))

    assert whole[:4] + tokens_in(rest) == whole
    assert server.bodies[-1]["max_tokens"] == 10


async def test_events_of_a_stream_pass_as_they_came() -> None:
    server = OpenAiServer(version=None)
    async with attached(server) as engine:
        outputs = await outputs_of(engine, body_request())
    texts = [output.text for output in outputs]
    events = events_in(outputs)

    assert events[-1] == b"data: [DONE]"
    assert len(events) == 1 + 5 + 1  # role, tokens, end
    assert b"length" in events[-2]
    # The end of the answer waits for the final.
    assert not any(b"length" in step.events for o in outputs[:-1] for step in o.details)
    assert tokens_in(outputs) == (UNKNOWN_TOKEN,) * 5
    response = json.loads(outputs[-1].response or b"")
    assert response["choices"][0]["message"]["content"] == "".join(texts)


async def test_a_silent_server_ends_the_run_and_a_slow_one_does_not() -> None:
    server = OpenAiServer(token_s=0.1)

    async def until_silent(engine: RemoteEngine) -> None:
        async for output in generate(engine, body_request(max_tokens=8)):
            if output.token_ids:
                server.hold()

    async with attached(server, silence_timeout_s=0.4) as engine:
        slow = await outputs_of(engine, body_request(max_tokens=8))
        with pytest.raises(NotActiveError, match="silent"):
            await until_silent(engine)

    assert len(tokens_in(slow)) == 8


async def test_token_counts_that_only_the_mesh_wants_do_not_reach_the_client() -> None:
    async with attached(OpenAiServer()) as engine:
        unasked = await outputs_of(engine, body_request())
        call = body_request().call
        assert call is not None
        asked = await outputs_of(
            engine,
            EngineRequest(
                request_id=RequestId("s"),
                model=MODEL,
                prompt=(),
                sampling=Sampling(),
                call=EngineCall(
                    endpoint=CHAT,
                    body=call.body,
                    streams=True,
                    stream_options=b'{"include_usage":true}',
                    seed=1,
                ),
            ),
        )

    assert [b"usage" in event for event in events_in(unasked)].count(True) == 0
    assert [b"usage" in event for event in events_in(asked)].count(True) == 1
    assert max(output.prompt_tokens for output in unasked) > 0
    assert b"usage" in (unasked[-1].response or b"")


async def test_whole_response_passes_as_it_came() -> None:
    async with attached(OpenAiServer()) as engine:
        outputs = await outputs_of(engine, body_request(streams=False))

    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, None]
    assert tokens_in(outputs) == (UNKNOWN_TOKEN,) * 5
    assert json.loads(outputs[-1].response or b"")["id"] == "x"


async def test_server_gets_its_own_name_of_the_model_and_no_priority() -> None:
    server = OpenAiServer(model="org/served")
    async with attached(server) as engine:
        await outputs_of(engine, body_request())

    assert server.bodies[-1]["model"] == "org/served"
    assert "priority" not in server.bodies[-1]


async def test_server_that_orders_requests_gets_class_and_deadline() -> None:
    server = OpenAiServer(priority=True)
    async with attached(server, TOKENS) as engine:
        for slo in (Slo(ttft_s=5.0), Slo(ttft_s=1.0), Slo(ttlt_s=1.0), Slo()):
            await outputs_of(engine, tokens_request(slo=slo, arrived_at=1000.0))
    later, sooner, whole, none = (body["priority"] for body in server.bodies[-4:])

    assert sooner < later < whole < none


async def test_abort_closes_the_connection() -> None:
    server = OpenAiServer(token_s=0.01)
    async with attached(server, TOKENS) as engine:
        long = tokens_request(Sampling(max_tokens=5000, temperature=0))
        await anext(generate(engine, long))
        engine.abort(RequestId("r"))

        # The answer takes 50 s; without the abort, the connection would stay open for as long.
        async def closed() -> bool:
            return server.open == 0

        await eventually(closed, within_s=20.0)
        assert engine.snapshot().running == 0


@pytest.mark.parametrize(
    ("status", "kind"), [(400, ContractError), (429, NotActiveError), (503, NotActiveError)]
)
async def test_refused_request_ends_alone(status: int, kind: type[Exception]) -> None:
    server = OpenAiServer()
    async with attached(server) as engine:
        server.refuse = (status, {"error": {"message": "no", "param": "messages"}})
        with pytest.raises(kind, match="no"):
            await outputs_of(engine, body_request())
        server.refuse = None

        assert len(tokens_in(await outputs_of(engine, body_request()))) == 5
        assert engine.alive


@pytest.mark.parametrize("streams", [True, False])
async def test_error_with_status_200_ends_the_answer_with_its_message(*, streams: bool) -> None:
    server = OpenAiServer(refuse=(200, {"error": {"message": "backend exploded", "code": 500}}))
    async with attached(server) as engine:
        with pytest.raises(ContractError, match="the server failed: backend exploded") as failed:
            await outputs_of(engine, body_request(streams=streams))

    assert failed.value.status == 502


async def test_error_instead_of_a_stream_of_tokens_has_its_message() -> None:
    server = OpenAiServer(refuse=(200, {"error": "backend exploded"}))
    async with attached(server, TOKENS) as engine:
        with pytest.raises(ContractError, match="the server failed: backend exploded"):
            await outputs_of(engine, tokens_request())


async def test_broken_connection_to_a_living_server_ends_one_run() -> None:
    server = OpenAiServer()
    async with attached(server, TOKENS) as engine:
        server.break_after = 3
        with pytest.raises(NotActiveError, match="connection broke"):
            await outputs_of(engine, tokens_request())
        assert engine.alive


async def test_lost_server_ends_all_runs_and_comes_back() -> None:
    server, port = OpenAiServer(), free_port()
    events: list[EngineEvent] = []
    async with server.serving(port) as url:
        engine = RemoteEngine([TOKENS], RemoteSettings(url=url))
        await engine.start()
        await engine.activate(MODEL)
        server.hold()
        engine.listen(events.extend)
        for name in "ab":
            engine.submit(tokens_request(request_id=RequestId(name)))

        async def sent() -> bool:
            return server.open == 2

        await eventually(sent)
    server.resume()

    async def dead() -> bool:
        return not engine.alive

    await eventually(dead)
    lost, *ends = [event for event in events if not isinstance(event, NewOutput)]
    assert isinstance(lost, EngineLost)
    assert {end.request_id for end in ends if isinstance(end, RunEnded)} == {"a", "b"}
    with pytest.raises(EngineError, match="does not answer"):
        await engine.start()
    async with OpenAiServer().serving(port):
        await engine.start()
        await engine.activate(MODEL)
        assert len(tokens_in(await outputs_of(engine, tokens_request()))) == 10
        await engine.close()


async def test_server_that_comes_back_with_another_version_is_refused() -> None:
    server = OpenAiServer()
    async with attached(server) as engine:
        server.version = "0.33.0"
        with pytest.raises(
            EngineError, match=r"was vllm-0\.32\.0 with m, and is now vllm-0\.33\.0"
        ):
            await engine.start()


async def test_model_that_the_server_lacks_is_named() -> None:
    server = OpenAiServer(model="other")
    with pytest.raises(
        EngineError, match=r"does not serve 'm2'; it serves other: set engine\.remo"
    ):
        async with attached(server, model="m2"):
            pass


LONG = Sampling(max_tokens=900, temperature=0.0, ignore_eos=True)


async def test_snapshot_has_the_servers_figures_and_a_queue_there_limits_us() -> None:
    server = OpenAiServer(token_s=0.005)
    async with attached(server, TOKENS, max_running=64) as engine:
        calm = engine.snapshot()
        for number in range(6):
            if number == 2:  # the others wait
                await eventually(lambda: engine.snapshot().most_run == 2)
                server.hold()
            engine.submit(tokens_request(LONG, request_id=RequestId(f"r{number}")))
        server.waiting = 4

        async def limited() -> bool:
            return engine.snapshot().max_running == 2

        await eventually(limited)
        busy = engine.snapshot()
        server.resume()

    assert (calm.max_running, calm.kv_capacity_tokens, calm.kv_utilization) == (4, 1024, 0.25)
    assert (busy.running, busy.waiting) == (2, 4)


async def test_resumed_body_leaves_out_what_was_sent() -> None:
    server = OpenAiServer()
    async with attached(server) as engine:
        whole = await outputs_of(engine, body_request())
        sent = whole[:2]
        progress = Progress(
            token_ids=tokens_in(sent), details=tuple(s for o in sent for s in o.details)
        )
        rest = await outputs_of(engine, body_request(children=(progress,)))

    # The first output has the text of the earlier run, for the final.
    assert rest[0].text == "".join(output.text for output in sent)
    assert tokens_in(sent) + tokens_in(rest) == tokens_in(whole)
    assert rest[-1].response == whole[-1].response
    assert events_in(sent + rest[1:]) == events_in(whole)


async def test_capabilities_say_what_a_server_lacks() -> None:
    async with attached(OpenAiServer()) as bodies, attached(OpenAiServer(), TOKENS) as tokens:
        assert bodies.identity.capabilities == {Capability.CALLS}
        assert tokens.identity.capabilities == {Capability.RESUME}
        assert bodies.identity.device != tokens.identity.device
        for refused in (bodies.warm(MODEL), bodies.cool(MODEL), bodies.preempt_now()):
            with pytest.raises(UnsupportedError):
                await refused


class _Host:
    """An engine host that takes no requests."""

    async def attach(self, *_: object) -> None: ...

    def detach(self, _url: str) -> None: ...


async def test_pooling_model_that_takes_tokens_is_refused() -> None:
    """Servers compute pooled inputs from bodies only."""
    entry = msgspec.structs.replace(TOKENS, task="embed")
    call = EngineCall(endpoint="/v1/embeddings", body=b'{"input":"a"}', seed=1)
    async with OpenAiServer().serving() as url:
        host: Any = _Host()
        engine = RemoteEngine([entry], RemoteSettings(url=url), host)
        try:
            await engine.start()
            await engine.activate(MODEL)
            with pytest.raises(UnsupportedError, match="set `takes`"):
                engine.submit(tokens_request(Sampling(max_tokens=1), prompt=(), call=call))
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"n": 1, "logprobs": None, "stop": ["x"]}, None),
    ],
)
async def test_fields_that_a_server_may_ignore_are_refused(
    fields: dict[str, Any], refused: str | None
) -> None:
    server = OpenAiServer(version=None)
    async with attached(server) as engine, attached(server, fields=("*",)) as trusting:
        if refused is None:
            await outputs_of(engine, body_request(**fields))
            assert server.bodies[-1].keys() == {"model", "messages", "max_tokens", "stop", "stream"}
            return
        with pytest.raises(ContractError, match=f"do not support {refused}") as error:
            engine.submit(body_request(**fields))
        await outputs_of(trusting, body_request(**fields))

        assert error.value.param == refused
        assert refused in server.bodies[-1]


async def test_key_is_sent() -> None:
    server = OpenAiServer()
    async with attached(server, api_key="secret"):
        assert server.authorizations == {"Bearer secret"}
