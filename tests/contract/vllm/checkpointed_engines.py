"""vLLM engines with KV checkpoints, all of one tiny model, and their measurements."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.engine_runs import generate
from services.agent.backends.base import EngineSnapshot
from services.agent.backends.policies import SchedulingSettings
from services.agent.backends.settings import VllmSettings
from services.agent.backends.totals import CheckpointTotals
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Tokens
from tests.contract.engine.engines import (
    LLAMA,
    EngineRig,
    greedy,
    prompt_of,
    tiny_entries,
    vllm_rig,
)

BLOCK_TOKENS = 32
MOST_TOKENS = 1280
"""Size of the engines' KV memory, minus one block."""
CACHING = ModelName("caching")
NOT_CACHING = ModelName("not-caching")
SMALL = ModelName("small")
FAULTY = ModelName("faulty")
SLOW = ModelName("slow")
TOO_SMALL = ModelName("too-small")
SMALL_BLOCKS = 20
BLOCK_BYTES = 65536


@asynccontextmanager
async def checkpointing(
    directory: Path, models: Callable[[ModelEntry], tuple[ModelEntry, ...]]
) -> AsyncIterator[EngineRig]:
    """A backend for variants of the tiny model, made by *models*; all may be warm together."""
    kill = vllm_rig(directory).kill  # without vLLM, the test is skipped or fails
    base = next(each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    settings = VllmSettings(
        log_path=str(directory / "vllm.log"),
        warm_bytes=4 << 30,
        scheduling=SchedulingSettings(max_chunk_tokens=128),
    )
    engine = VllmEngine(models(base), settings)
    await engine.start()
    yield EngineRig(engine, kill)
    await engine.close()


def variants(base: ModelEntry) -> tuple[ModelEntry, ...]:
    """Variants of one model with different engine arguments, each with KV for one long request."""

    def variant(name: ModelName, **fields: Any) -> ModelEntry:
        limits = {"max_model_len": 1024, "max_num_batched_tokens": 256}
        limits["num_gpu_blocks_override"] = MOST_TOKENS // BLOCK_TOKENS
        return msgspec.structs.replace(
            base, name=name, max_model_len=1024, engine_args=limits | fields
        )

    def host_memory(size: int, **fields: str) -> dict[str, Any]:
        return {
            "kv_connector": "HostKvConnector",
            "kv_connector_module_path": "services.agent.backends.vllm.kv.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_kv_bytes": size, "required": True},
        } | fields

    return (
        variant(CACHING),
        variant(NOT_CACHING, enable_prefix_caching=False),
        variant(
            SMALL,
            enable_prefix_caching=False,
            scheduler_cls="services.agent.backends.vllm.core.scheduler.TimedScheduler",
            # The size is not a multiple of a block.
            kv_transfer_config=host_memory(SMALL_BLOCKS * BLOCK_BYTES + 1000),
        ),
        variant(
            FAULTY,
            kv_transfer_config=host_memory(
                1 << 26,
                kv_connector="FaultyConnector",
                kv_connector_module_path="tests.contract.vllm.faulty_kv",
            ),
        ),
        variant(
            SLOW,
            kv_transfer_config=host_memory(
                1 << 26,
                kv_connector="SlowConnector",
                kv_connector_module_path="tests.contract.vllm.slow_kv",
            ),
        ),
        variant(TOO_SMALL, kv_transfer_config=host_memory(BLOCK_BYTES - 1)),
    )


class Measured:
    """Measurements of one engine over an interval."""

    def __init__(self, rig: EngineRig) -> None:
        self._rig = rig
        self._before = rig.engine.snapshot()
        rig.engine.drain_iterations()

    @property
    def now(self) -> EngineSnapshot:
        return self._rig.engine.snapshot()

    @property
    def copied(self) -> CheckpointTotals:
        before, after = self._before.checkpoints, self.now.checkpoints
        return CheckpointTotals(
            saved_blocks=after.saved_blocks - before.saved_blocks,
            restored_blocks=after.restored_blocks - before.restored_blocks,
        )

    @property
    def preempted(self) -> int:
        return self.now.scheduling.preempted - self._before.scheduling.preempted

    def computed(self) -> int:
        return sum(it.compute_tokens for it in self._rig.engine.drain_iterations())


async def flood(rig: EngineRig, model: ModelName) -> None:
    """Overwrite all of the engine's KV memory with requests that are not checkpointed."""
    await rig.ask(prompt_of(1000, first=200), greedy(2), model=model)
    await rig.ask(prompt_of(1000, first=201), greedy(2), model=model)


ANSWER_TOKENS = 100
"""Answer length of `begun`."""
ROUNDS = 5
"""Maximum number of attempts: on a busy machine, an answer may end before the abort."""


async def begun(rig: EngineRig, prompt: Tokens, tokens: int, model: ModelName) -> Tokens:
    """Begin an answer, abort it after *tokens* tokens or a few more, and return these tokens."""
    for _ in range(ROUNDS):
        rig.engine.drain_iterations()
        request = rig.request(prompt, greedy(ANSWER_TOKENS), model=model, checkpointed=True)
        progress: list[int] = []
        async for output in generate(rig.engine, request):
            progress += output.token_ids
            if len(progress) >= tokens:
                break
        await rig.settled()
        # On a busy machine the answer may have ended before the abort reached the engine, even if
        # that is not visible here. The request then leaves no copies.
        decodes = sum(each.num_decodes for each in rig.engine.drain_iterations())
        if decodes < ANSWER_TOKENS - 2:
            return tuple(progress)
    pytest.fail(f"{ROUNDS} answers may have ended before they were aborted")
