"""`kill -9` of each process of `headway up` while streams run."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from ops.ports import free_port
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]
STREAMS, ANSWER_TOKENS = 20, 240
START_S = 120.0


@dataclass
class Up:
    """A running `headway up`."""

    process: asyncio.subprocess.Process
    url: str
    directory: Path

    @property
    def said(self) -> str:
        return (self.directory / "said").read_text()

    def pid_of(self, name: str) -> int:
        """Process id of a service, by its settings file."""
        suffix = f"{self.directory / 'log' / name}.json"
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                except OSError:
                    continue
                if suffix in arguments:
                    return int(entry.name)
        raise AssertionError(f"{name} does not run")


@asynccontextmanager
async def running(broker: str, directory: Path) -> AsyncIterator[Up]:
    port = free_port()
    settings = {
        "HEADWAY_AGENT_ENGINE__SIMULATED__TIME_SCALE": "3",
        "HEADWAY_AGENT_ENGINE__SIMULATED__MAX_RUNNING": "16",
    }
    with (directory / "said").open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.mesh", "up", "--broker", broker),
            *("--port", str(port), "--log-dir", str(directory / "log")),
            *("--data-dir", str(directory / "data")),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=said,
            env=os.environ | settings,
        )
    up = Up(process, f"http://127.0.0.1:{port}", directory)
    try:
        await eventually(lambda: "ready:" in up.said, within_s=START_S)
        yield up
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


@pytest.fixture
async def up(rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path) -> AsyncIterator[Up]:
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        async with running(url, tmp_path) as made:
            yield made


async def streamed(client: openai.AsyncOpenAI, number: int) -> int:
    """Number of tokens of one answer, which is complete."""
    stream = await client.completions.create(
        model=LLAMA,
        prompt=f"stream {number}",
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "slo": {"ttlt_s": 120}},
    )
    usage, reason = None, None
    async for part in stream:
        usage = part.usage or usage
        reason = part.choices[0].finish_reason or reason if part.choices else reason
    assert reason == "length"
    assert usage is not None
    return usage.completion_tokens


@pytest.mark.parametrize("name", ["agent-agent-0", "grouper-0", "leader-0", "estimator"])
async def test_streams_outlive_the_kill_of_any_process_behind_the_gateway(up: Up, name: str):
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="x", max_retries=0) as client:
        answers = [asyncio.create_task(streamed(client, number)) for number in range(STREAMS)]
        await asyncio.sleep(2.0)
        os.kill(up.pid_of(name), signal.SIGKILL)
        assert await asyncio.gather(*answers) == [ANSWER_TOKENS] * STREAMS
        shown = name.removeprefix("agent-")
        await eventually(lambda: f"{shown} was killed by signal 9 (SIGKILL)" in up.said)
        assert await streamed(client, STREAMS) == ANSWER_TOKENS


async def test_requests_with_a_key_outlive_the_kill_of_the_gateway(up: Up):
    body = {"model": LLAMA, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "slo": {}}

    async def answered(number: int) -> int:
        headers = {"idempotency-key": f"key-{number}"}
        while True:
            try:
                async with httpx.AsyncClient(base_url=up.url, timeout=60.0) as http:
                    found = await http.post(
                        "/v1/completions", json=body | {"prompt": str(number)}, headers=headers
                    )
            except httpx.TransportError:
                await asyncio.sleep(0.5)
                continue
            if found.status_code == 503:
                await asyncio.sleep(0.5)
                continue
            assert found.status_code == 200, found.text
            return int(found.json()["usage"]["completion_tokens"])

    answers = [asyncio.create_task(answered(number)) for number in range(STREAMS)]
    await asyncio.sleep(2.0)
    os.kill(up.pid_of("gateway"), signal.SIGKILL)
    assert await asyncio.gather(*answers) == [ANSWER_TOKENS] * STREAMS
    assert "gateway was killed by signal 9 (SIGKILL); started again" in up.said
