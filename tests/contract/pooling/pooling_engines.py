"""vLLM engines of pooling models, and requests with vLLM's encoded pooling parameters."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ops.engine_runs import generate
from services.agent.backends.base import EnginePayload, EngineRequest
from services.agent.backends.policies import PolicyName
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.api.pooling import NO_SAMPLING
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import FinishReason, Tokens
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_POOLING_MODELS, make_tiny_models
from shared.models.tiny_tokenizer import VOCAB_SIZE, write_tokenizer
from tests.contract.engine.engines import EngineRig, kill_cores, vllm_rig

EMBED = ModelName("tiny-embed")
"""Decoder with KV and divided prompts."""
BERT = ModelName("tiny-bert")
"""Encoder, which has no KV and computes each input in one iteration."""
Vector = np.ndarray[Any, np.dtype[np.float32]]


class PoolingRig(EngineRig):
    """A rig for requests to pooling models."""

    def pooled(
        self,
        inputs: Sequence[Tokens],
        *,
        model: ModelName = EMBED,
        slo: Slo | None = None,
        **params: Any,
    ) -> EngineRequest:
        """
        A request with *inputs*.

        Args:
            inputs: Tokens of each input.
            model: The model, which is active.
            slo: Targets; best effort if None.
            params: Fields of vLLM's `PoolingParams`.
        """
        prompt = tuple(token for tokens in inputs for token in tokens)
        request = self.request(prompt, NO_SAMPLING, model=model, slo=slo or Slo())
        encodable = [_encodable({"task": "embed"} | params)] * len(inputs)
        payload = EnginePayload((msgspec.msgpack.encode(encodable),))
        lengths = tuple(len(tokens) for tokens in inputs)
        return replace(request, input_lengths=lengths, payload=payload)

    async def vectors(self, *inputs: Tokens, **fields: Any) -> Vector:
        """The vectors of *inputs*, float32[num_inputs, width]."""
        return await self.vectors_of(self.pooled(inputs, **fields))

    async def vectors_of(self, request: EngineRequest) -> Vector:
        """The vectors of the inputs of *request*."""
        (output,) = [output async for output in generate(self.engine, request)]
        assert (output.token_ids, output.finish_reason) == ((), FinishReason.STOP)
        assert all(step.num_tokens == 0 for step in output.details)
        # VLLM's encoder puts the numbers of a large tensor into the second buffer.
        rows = [np.frombuffer(step.parts[1], np.float32) for step in output.details]
        return np.array(rows)


def _encodable(params: dict[str, Any]) -> tuple[Any, ...]:
    """An input as vLLM encodes it, made without vLLM."""
    names = ("use_activation", "dimensions", "step_tag_id", "returned_token_ids", "task")
    later = (("requires_token_ids", False), ("skip_reading_prefix_cache", None))
    pooling = [params.get(name) for name in names]
    pooling += [params.get(name, default) for name, default in later]
    pooling += [params.get("late_interaction_params")]
    return ("", None, None, None, pooling, 0.0, None, None, None)


@asynccontextmanager
async def pooling_rig(directory: Path, policy: PolicyName) -> AsyncIterator[PoolingRig]:
    """A backend with `EMBED` and `BERT`; both may be warm together."""
    vllm_rig(directory)  # skips or fails without vLLM
    models = {EMBED: TINY_POOLING_MODELS[EMBED]}
    entry = ModelRegistry.load(make_tiny_models(directory, models=models)).entry(EMBED)
    settings = VllmSettings(log_path=str(directory / "vllm.log"), warm_bytes=4 << 30, policy=policy)
    engine = VllmEngine((entry, _tiny_bert(directory / BERT)), settings)
    try:
        await engine.start()
        yield PoolingRig(engine, partial(kill_cores, engine))
    finally:
        await engine.close()


def _tiny_bert(path: Path) -> ModelEntry:
    """Create an encoder with random weights."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - installed with the engine

    hidden, inner, positions = 128, 256, 512
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB_SIZE, hidden),
        "embeddings.position_embeddings.weight": (positions, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        **_norm("embeddings.LayerNorm", hidden),
        **_linear("pooler.dense", hidden, hidden),
    }
    for layer in range(2):
        prefix = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{prefix}.attention.self.{name}", hidden, hidden)
        shapes |= _linear(f"{prefix}.attention.output.dense", hidden, hidden)
        shapes |= _norm(f"{prefix}.attention.output.LayerNorm", hidden)
        shapes |= _linear(f"{prefix}.intermediate.dense", inner, hidden)
        shapes |= _linear(f"{prefix}.output.dense", hidden, inner)
        shapes |= _norm(f"{prefix}.output.LayerNorm", hidden)
    chance = np.random.default_rng(7)
    path.mkdir()
    save_file(
        {name: chance.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(path)
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return ModelEntry(
        name=BERT, path=str(path), architecture="BertModel", max_model_len=positions, task="embed"
    )


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
