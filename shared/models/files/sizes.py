"""Sizes of a model's weights and KV, from its files."""

from pathlib import Path

import msgspec

from shared.contracts.models import ModelEntry

ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "distilbert", "electra", "gte", "modernbert", "mpnet"),
        *("new", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
"""Values of `model_type` in `config.json` of encoders, which keep no KV."""
_WEIGHTS = ("*.safetensors", "*.bin")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEFAULT_BYTES = 2


class _Config(msgspec.Struct, frozen=True):
    """Fields of a model's `config.json` that determine the size of its KV."""

    model_type: str = ""
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    hidden_size: int = 0
    head_dim: int | None = None
    kv_lora_rank: int | None = None
    """Width of compressed keys and values (multi-head latent attention)."""
    qk_rope_head_dim: int = 0
    dtype: str | None = None
    torch_dtype: str | None = None
    """Name of the field `dtype` in older `config.json` files."""
    text_config: "_Config | None" = None
    """Fields of the language model, if the model also reads images."""


def kv_bytes_per_token(entry: ModelEntry) -> int:
    """
    Size of one token's keys and values over all layers, in bytes; 0 if `config.json` lacks the
    fields, and for encoders.

    Assumes that the engine keeps KV in the model's own precision.
    """
    try:
        body = (Path(entry.path) / "config.json").read_bytes()
        config = msgspec.json.decode(body, type=_Config)
    except (OSError, msgspec.DecodeError):
        return 0
    config = config.text_config or config
    if config.model_type in ENCODERS:
        return 0
    element_bytes = _BYTES.get(config.dtype or config.torch_dtype or "", _DEFAULT_BYTES)
    return config.num_hidden_layers * _kv_width(config) * element_bytes


def _kv_width(config: _Config) -> int:
    """Number of values that one layer keeps for a token."""
    if config.kv_lora_rank:
        return config.kv_lora_rank + config.qk_rope_head_dim
    heads = config.num_key_value_heads or config.num_attention_heads
    width = config.head_dim or (config.hidden_size // max(1, config.num_attention_heads))
    return 2 * heads * width


def weight_files(entry: ModelEntry) -> tuple[Path, ...]:
    """Weight files of *entry*'s directory, in the first format that it has."""
    for pattern in _WEIGHTS:
        if files := sorted(Path(entry.path).glob(pattern)):
            return tuple(files)
    return ()


def weight_bytes(entry: ModelEntry) -> int:
    """Size of a model's weights from the registry or, without an entry, of the weight files."""
    return entry.weight_bytes or sum(file.stat().st_size for file in weight_files(entry))
