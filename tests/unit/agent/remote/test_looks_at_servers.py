"""What an attached server shows in its metrics, and the agent's own runs at the server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.agent.backends.base import EngineCall, EngineRequest
from services.agent.backends.remote.backend import WATCH_PERIOD_S, RemoteEngine
from services.agent.backends.remote.server import Description, Server
from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling

pytestmark = pytest.mark.virtual_time

MODEL = ModelName("m")
ENTRY = ModelEntry(name=MODEL, path="none", max_model_len=64)


def metrics(*, kv_utilization: float = 0.0, waiting: int = 0) -> str:
    """Metrics of a server whose requests are those of other clients."""
    return (
        'vllm:num_requests_running{engine="0"} 0.0\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {kv_utilization}\n'
    )


class Shown:
    """What the server shows to each look."""

    metrics = ""
    answers = True


class Host:
    """An engine host whose runs have no tokens."""

    async def attach(self, *_: object) -> None: ...

    def detach(self, _url: str) -> None: ...

    def submit(self, _request: EngineRequest, **_: object) -> None: ...

    def abort(self, _request_id: RequestId) -> None: ...


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    state = Shown()

    async def describe(_server: Server) -> Description:
        return Description(version=None, models=())

    async def healthy(_server: Server) -> None:
        if not state.answers:
            raise EngineError("the server does not answer", engine_dead=True)

    async def text(server: Server, _path: str) -> str:
        await healthy(server)
        return state.metrics

    for function in (describe, healthy, text):
        monkeypatch.setattr(Server, function.__name__, function)
    return state


@pytest.fixture
async def engine(shown: Shown) -> AsyncIterator[RemoteEngine]:
    """An engine that was started when the server had no load."""
    shown.metrics = metrics()
    host: Any = Host()
    made = RemoteEngine([ENTRY], RemoteSettings(url="http://a:1"), host)
    await made.start()
    await made.activate(MODEL)
    yield made
    await made.close()


async def looked() -> None:
    """Let the engine look twice at the server."""
    await asyncio.sleep(2.5 * WATCH_PERIOD_S)


async def test_metrics_that_are_missing_once_are_read_again(
    shown: Shown, engine: RemoteEngine
) -> None:
    shown.metrics = ""
    await looked()
    shown.metrics = metrics(kv_utilization=0.75)
    await looked()

    assert engine.snapshot().kv_utilization == 0.75


@pytest.mark.parametrize("dies", [False, True], ids=["aborted", "server dies"])
async def test_ended_run_of_the_engine_host_no_longer_counts(
    shown: Shown, engine: RemoteEngine, *, dies: bool
) -> None:
    """Requests of other clients wait in the server all the time."""
    shown.metrics = metrics(waiting=3)
    await looked()
    name = RequestId("r")
    call = EngineCall(endpoint="/v1/completions", body=b'{"prompt":"x"}', seed=1)
    sampling = Sampling(max_tokens=4)
    engine.submit(
        EngineRequest(request_id=name, model=MODEL, prompt=(), sampling=sampling, call=call)
    )
    before = engine.snapshot()
    if dies:
        shown.answers = False
        await looked()
    else:
        engine.abort(name)
    after = engine.snapshot()

    assert (before.running, before.waiting) == (0, 1)
    assert (after.running, after.waiting) == (0, 0)
    assert engine.alive is not dies
