"""Size of a model's KV."""

from pathlib import Path

import msgspec

from shared.contracts.models import ModelEntry

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEFAULT_BYTES = 2


class _Config(msgspec.Struct, frozen=True):
    """Fields of a model's `config.json` that determine the size of its KV."""

    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    hidden_size: int = 0
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    """Name of the field `dtype` in older `config.json` files."""
    text_config: "_Config | None" = None
    """Fields of the language model, if the model also reads images."""


def kv_bytes_per_token(entry: ModelEntry) -> int:
    """
    Size of one token's keys and values over all layers, in bytes; 0 if `config.json` lacks the
    fields.

    Assumes that the engine keeps KV in the model's own precision.
    """
    try:
        body = (Path(entry.path) / "config.json").read_bytes()
        config = msgspec.json.decode(body, type=_Config)
    except (OSError, msgspec.DecodeError):
        return 0
    config = config.text_config or config
    heads = config.num_key_value_heads or config.num_attention_heads
    width = config.head_dim or (config.hidden_size // max(1, config.num_attention_heads))
    element_bytes = _BYTES.get(config.dtype or config.torch_dtype or "", _DEFAULT_BYTES)
    return 2 * config.num_hidden_layers * heads * width * element_bytes
