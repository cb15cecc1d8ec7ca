"""Starts vLLM's own API server, `vllm serve`."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

from ops.devices import gpus
from ops.ports import free_port
from ops.setup import VLLM_LAUNCHER
from shared.contracts.errors import EngineError

START_S = 300.0
_ON_CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # As in the mesh's engines: vLLM's default pins the engines of all servers to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The first requests do not wait for the compilation of one function.
    "TORCHDYNAMO_DISABLE": "1",
    # The worker runs in the process of its engine core, as in the mesh's engines.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def environment() -> dict[str, str]:
    """Variables for `vllm serve` on the device of this machine."""
    return _ENVIRONMENT | ({} if gpus() else _ON_CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class StockServer:
    """A running `vllm serve`."""

    url: str
    pid: int
    """Process id of the API server; its engine core is a child process."""


@asynccontextmanager
async def stock_server(
    arguments: Sequence[str],
    log: Path,
    *,
    port: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[StockServer]:
    """
    Context with a running `vllm serve`.

    Args:
        arguments: Arguments after `vllm serve`, without host and port.
        log: File for the server's output.
        port: Port of the server; None: a free port.
        variables: Environment variables beyond those of `environment`.

    Raises:
        EngineError: The server ended before it was ready; the message has the end of its log.
        TimeoutError: The server is not ready after `START_S`.
    """
    port = port or free_port()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", VLLM_LAUNCHER, "serve", "--host", "127.0.0.1"),
            *("--port", str(port), *arguments),
            env=os.environ | environment() | dict(variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _ready(url, process, log)
        yield StockServer(url=url, pid=process.pid)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(START_S):
        while True:
            if process.returncode is not None:
                raise EngineError(f"vllm serve ended:\n{log.read_text()[-3000:]}")
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
