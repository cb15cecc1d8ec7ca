"""Four real `vllm serve` with a tiny model on this machine's CPU, for `ops.bench doors`."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from ops.bench.doors_cells import Cell
from ops.bench.doors_processes import RunningServer
from ops.bench.vllm_serve import stock_server
from shared.contracts.base import ModelName
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = ModelName("tiny-llama")
"""The model, which the servers call by the cell's names."""
_WITH_RESET = {"VLLM_SERVER_DEV_MODE": "1"}
"""With this variable a server has `/reset_prefix_cache`."""


@asynccontextmanager
async def real_servers(cell: Cell) -> AsyncIterator[list[RunningServer]]:
    """Context with running `vllm serve`, which start one after another."""
    with tempfile.TemporaryDirectory(prefix="headway-doors-") as directory:
        root = Path(directory)
        models = make_tiny_models(root / "models", models={MODEL: TINY_MODELS[MODEL]})
        entry = ModelRegistry.load(models).entry(MODEL)
        async with AsyncExitStack() as stack:
            servers = []
            for number, model in enumerate(cell.models):
                arguments = (
                    *("--model", entry.path, "--served-model-name", model, "--enforce-eager"),
                    *("--dtype", "float32", "--max-model-len", str(entry.max_model_len)),
                    *("--scheduling-policy", "priority", "--max-num-seqs", str(cell.max_running)),
                )
                log = root / f"serve-{number}.log"
                server = await stack.enter_async_context(
                    stock_server(arguments, log, variables=_WITH_RESET)
                )
                servers.append(RunningServer(model=model, url=server.url))
            yield servers


async def without_cached_prompts(servers: Sequence[RunningServer]) -> None:
    """Empty the caches of all servers, so that no door finds the prompts of another."""
    async with aiohttp.ClientSession() as http:

        async def reset(server: RunningServer) -> None:
            async with http.post(f"{server.url}/reset_prefix_cache") as response:
                response.raise_for_status()

        await asyncio.gather(*(reset(server) for server in servers))
