"""Random weights for the tiny models, written without a deep-learning library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.contracts.models import ModelTask
from shared.models.tiny_tokenizer import BOS_ID, EOS_IDS, VOCAB_SIZE

_SPREAD = 0.15
"""
Standard deviation of the random weights.

With the usual 0.02, greedy decoding would repeat one token.
"""

MAX_POSITIONS = 16384


class TinyArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """A small decoder-only transformer with grouped-query attention."""

    architecture: str
    model_type: str
    seed: int
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 4
    num_heads: int = 2
    num_kv_heads: int = 1
    head_size: int = 64
    qkv_bias: bool = False
    task: ModelTask = "generate"
    vocab_size: int = VOCAB_SIZE
    num_labels: int = 0
    """Number of classes; 0: the model has a token for each output instead."""

    def config(self) -> dict[str, object]:
        """Content of the model's `config.json`."""
        labels = {str(label): f"label-{label}" for label in range(self.num_labels)}
        return {
            **({"id2label": labels} if labels else {}),
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": BOS_ID,
            "eos_token_id": list(EOS_IDS),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight name in the checkpoint -> shape of the weight."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size)
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, self.hidden_size)
                if self.qkv_bias:
                    shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
            shapes[f"{prefix}.self_attn.o_proj.weight"] = (self.hidden_size, queries)
            for name in ("gate", "up"):
                shapes[f"{prefix}.mlp.{name}_proj.weight"] = (
                    self.intermediate_size,
                    self.hidden_size,
                )
            shapes[f"{prefix}.mlp.down_proj.weight"] = (self.hidden_size, self.intermediate_size)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}.{name}.weight"] = (self.hidden_size,)
        shapes["model.norm.weight"] = (self.hidden_size,)
        if self.num_labels:
            shapes["score.weight"] = (self.num_labels, self.hidden_size)
        else:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    @property
    def weight_bytes(self) -> int:
        """Size of the model's weights in float32, in bytes."""
        return size_of(self.shapes())

    def save_weights(self, path: Path) -> None:
        """
        Write a safetensors file of deterministic random weights.

        Raises:
            ImportError: safetensors is not installed; it is installed with the engine.
        """
        save_random_weights(path, self.shapes(), self.seed)


def size_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Size of weights of the *shapes* in float32, in bytes."""
    return 4 * sum(int(np.prod(shape)) for shape in shapes.values())


def save_random_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """
    Write `random_weights` to the safetensors file *path*.

    Raises:
        ImportError: safetensors is not installed; it is installed with the engine.
    """
    # Imported here, since configurations and tokenizers can be written without it.
    from safetensors.numpy import save_file  # noqa: PLC0415

    save_file(random_weights(shapes, seed), path, metadata={"format": "pt"})


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """
    Weights of the *shapes*, which depend on the seed only; the scales of normalizations are 1.
    """
    chance = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else chance.normal(0.0, _SPREAD, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
