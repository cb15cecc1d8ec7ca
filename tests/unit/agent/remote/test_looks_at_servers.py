"""Looks at the metrics of an attached server."""

import asyncio

import pytest

from services.agent.backends.remote.backend import WATCH_PERIOD_S, RemoteEngine
from services.agent.backends.remote.server import Description, Server
from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry

pytestmark = pytest.mark.virtual_time

ENTRY = ModelEntry(name=ModelName("m"), takes="bodies", max_model_len=64)
NO_METRICS = ""


def metrics(kv_utilization: float) -> str:
    """Metrics of a server without requests."""
    return (
        'vllm:num_requests_running{engine="0"} 0.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {kv_utilization}\n'
    )


async def test_metrics_that_are_missing_once_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = metrics(0.25)

    async def describe(_server: Server) -> Description:
        return Description(version=None, models=())

    async def text(_server: Server, _path: str) -> str:
        return shown

    async def healthy(_server: Server) -> None:
        """The server answers all the time."""

    for function in (describe, text, healthy):
        monkeypatch.setattr(Server, function.__name__, function)
    engine = RemoteEngine([ENTRY], RemoteSettings(url="http://a:1"))
    try:
        await engine.start()
        before = engine.snapshot().kv_utilization
        shown = NO_METRICS
        await asyncio.sleep(2 * WATCH_PERIOD_S)
        shown = metrics(0.75)
        await asyncio.sleep(2 * WATCH_PERIOD_S)
        after = engine.snapshot().kv_utilization
    finally:
        await engine.close()

    assert (before, after) == (0.25, 0.75)
