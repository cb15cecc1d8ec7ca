"""vLLM engines for structured outputs, and requests with vLLM's encoded sampling parameters."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from services.agent.backends.base import EnginePayload
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Tokens
from shared.models.tiny_tokenizer import EOS_IDS, VOCAB_SIZE
from tests.contract.engine.engines import LLAMA, Answer, EngineRig, greedy, tiny_entries, vllm_rig

MAX_TOKENS = 200
PLAIN = ModelName("plain")
OTHER = ModelName("other")
"""The same model in an engine with another scheduler, which spoils outputs of some requests."""
THINKING = ModelName("thinking")
"""The same model with reasoning before its answers."""
SPOILED = "spoiled"
"""Beginning of the ids of requests whose outputs are spoiled."""
BEGIN_THINKING, END_THINKING = VOCAB_SIZE - 2, VOCAB_SIZE - 1


class StructuredRig(EngineRig):
    """A rig for requests with parameters of vLLM."""

    async def constrained(
        self, model: ModelName, prompt: Tokens, progress: Tokens = (), **sampling: Any
    ) -> Answer:
        """
        Ask *model*, which is active, for an answer that continues after *progress*.

        Args:
            sampling: Fields of vLLM's `SamplingParams`.
        """
        request = self.request(prompt, greedy(MAX_TOKENS), model=model, progress=progress)
        fields = {"max_tokens": MAX_TOKENS, "stop_token_ids": EOS_IDS, "temperature": 0.0}
        return await self.answer(replace(request, payload=self._payload(fields | sampling)))

    def _payload(self, sampling: dict[str, Any]) -> EnginePayload:
        """A payload as vLLM encodes it, made without vLLM."""
        request = ("", None, None, sampling, None, 0.0, None, None, None)
        return EnginePayload((msgspec.msgpack.encode(request),))


@asynccontextmanager
async def structured_rig(directory: Path, **settings: Any) -> AsyncIterator[StructuredRig]:
    """
    A backend with `PLAIN`, `OTHER` and `THINKING`; all may be warm together.

    Args:
        settings: Fields of `VllmSettings` that differ from the defaults.
    """
    kill = vllm_rig(directory).kill  # without vLLM, the test is skipped or fails
    base = next(each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    fields = {"log_path": str(directory / "vllm.log"), "warm_bytes": 4 << 30} | settings
    engine = VllmEngine(_variants(base, directory), VllmSettings(**fields))
    try:
        await engine.start()
        yield StructuredRig(engine, kill)
    finally:
        await engine.close()


def _variants(base: ModelEntry, directory: Path) -> tuple[ModelEntry, ...]:
    # Without this setting models with random weights write whitespace without end.
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}

    def variant(name: ModelName, path: str, **fields: Any) -> ModelEntry:
        engine_args = {"structured_outputs_config": grammars} | fields
        return msgspec.structs.replace(base, name=name, path=path, engine_args=engine_args)

    thinking = directory / "thinking"
    _write_thinking_model(Path(base.path), thinking)
    return (
        variant(PLAIN, base.path),
        variant(
            OTHER,
            base.path,
            scheduler_cls="tests.contract.structured.spoiled_outputs.SpoilingScheduler",
            enable_prefix_caching=False,
        ),
        msgspec.structs.replace(variant(THINKING, str(thinking)), reasoning_parser="deepseek_r1"),
    )


def _write_thinking_model(source: Path, target: Path) -> None:
    """Copy a tiny model; its last two merges become the tokens that enclose reasoning."""
    shutil.copytree(source, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    model = tokenizer["model"]
    replaced = {text for text, token in model["vocab"].items() if token >= BEGIN_THINKING}
    model["vocab"] = {text: token for text, token in model["vocab"].items() if text not in replaced}
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) not in replaced]
    for token, text in ((BEGIN_THINKING, "<think>"), (END_THINKING, "</think>")):
        tokenizer["added_tokens"].append(
            {"id": token, "content": text, "special": False, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        )
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
