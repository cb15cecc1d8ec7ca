"""Reads a model's shape from a Hugging Face `config.json`."""

from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from ops.profiling.model_shape import DType, ModelShape
from shared.contracts.errors import SettingsError

DENSE = frozenset({"granite", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""
Model types whose layers have the form of `ModelShape`; other types are accepted if their fields
match.
"""
_FILE = "config.json"
_LIMITS = {
    "hidden_size": 65_536,
    "intermediate_size": 262_144,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 256,
    "vocab_size": 1 << 21,
    "max_position_embeddings": 1 << 24,
    "sliding_window": 1 << 24,
}
_OTHER_LAYERS = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "state_size": "state space layers",
    "mamba_d_state": "state space layers",
    "linear_num_key_heads": "linear attention",
    "is_encoder_decoder": "an encoder",
    "quantization_config": "quantised weights",
}
_GATED = ("silu", "swish")
_DTYPES: dict[str, DType] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
_DEFAULT_MAX_TOKENS = 2048
"""Default of `max_position_embeddings` in Transformers."""


def read_shape(path: Path) -> ModelShape:
    """
    The shape in *path*, a `config.json` or a folder with one.

    Raises:
        SettingsError: The file cannot be read, a field is missing or out of range, or the layers
            are of another kind; the message names the field.
    """
    file = path / _FILE if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file} must hold an object, not {type(config).__name__}")
    name = file.parent.resolve().name if file.name == _FILE else file.stem
    return _Fields(config, file).shape(name)


class _Fields:
    """Reads and checks the fields of one `config.json`."""

    def __init__(self, config: Mapping[str, object], file: Path) -> None:
        self._config = config
        self._file = file

    def shape(self, name: str) -> ModelShape:
        self._check_kind()
        hidden_size = self._number("hidden_size")
        num_heads = self._number("num_attention_heads")
        num_kv_heads = self._number("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            self._refuse(f"num_attention_heads: {num_heads} is not a multiple of "
                         f"num_key_value_heads, {num_kv_heads}")  # fmt: skip
        max_tokens, max_tokens_field = self._max_tokens()
        return ModelShape(
            name=name,
            hidden_size=hidden_size,
            intermediate_size=self._number("intermediate_size"),
            num_layers=self._number("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=self._head_size(hidden_size, num_heads),
            vocab_size=self._number("vocab_size"),
            max_tokens=max_tokens,
            max_tokens_field=max_tokens_field,
            dtype=self._dtype(),
        )

    def _check_kind(self) -> None:
        """Check that the layers are dense, with a gated MLP."""
        kind = self._config.get("model_type")
        if not isinstance(kind, str):
            self._refuse("model_type is missing")
        for field, what in _OTHER_LAYERS.items():
            if _says(self._config.get(field)):
                self._refuse(f"model_type {kind!r}: {field} means {what}, which cannot be timed")
        if kind in DENSE:
            return
        known = f"supported are {', '.join(sorted(DENSE))}, and equivalent types"
        if "hidden_size" not in self._config:
            self._refuse(f"model_type {kind!r} has no hidden_size; {known}")
        if self._config.get("hidden_act") not in _GATED or "rms_norm_eps" not in self._config:
            self._refuse(
                f"model_type {kind!r}: hidden_act {self._config.get('hidden_act')!r}, "
                f"{'with' if 'rms_norm_eps' in self._config else 'without'} rms_norm_eps, is "
                f"not a gated MLP between RMS norms; {known}"
            )

    def _head_size(self, hidden_size: int, num_heads: int) -> int:
        if self._config.get("head_dim") is None and hidden_size % num_heads:
            self._refuse(
                f"head_dim is missing, and hidden_size, {hidden_size}, is not a multiple of "
                f"num_attention_heads, {num_heads}"
            )
        return self._number("head_dim", hidden_size // num_heads)

    def _max_tokens(self) -> tuple[int, str]:
        """
        The smallest limit of prompt and answer tokens, and the name of the field that states it.
        """
        limits = [(self._number("max_position_embeddings", _DEFAULT_MAX_TOKENS),
                   "max_position_embeddings")]  # fmt: skip
        if self._config.get("use_sliding_window", True) is not False:
            limits.append((self._number("sliding_window", limits[0][0]), "sliding_window"))
        return min(limits, key=lambda limit: limit[0])

    def _number(self, field: str, default: int | None = None) -> int:
        """The integer value of *field*, which must be within its limits."""
        value = self._config.get(field)
        if value is None:
            value = default
        if value is None:
            self._refuse(f"{field} is missing")
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(f"{field}: {value!r} is not an integer")
        if not 1 <= value <= _LIMITS[field]:
            self._refuse(f"{field}: {value} must be from 1 to {_LIMITS[field]}")
        return value

    def _dtype(self) -> DType:
        """
        Data type from `dtype` (newer Transformers) or `torch_dtype`; without both fields, the
        engines' default.
        """
        field = "dtype" if "dtype" in self._config else "torch_dtype"
        found = self._config.get(field) or "bfloat16"
        if not isinstance(found, str) or found not in _DTYPES:
            self._refuse(f"{field}: {found!r} must be one of {', '.join(_DTYPES)}")
        return _DTYPES[found]

    def _refuse(self, message: str) -> NoReturn:
        raise SettingsError(f"{self._file}: {message}")


def _says(value: object) -> bool:
    """Return whether the field is set; the value 1 (a single expert) counts as not set."""
    return value is True or (value > 1 if isinstance(value, int) else bool(value))
