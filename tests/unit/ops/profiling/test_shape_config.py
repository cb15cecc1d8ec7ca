"""Reading a model's shape from its `config.json`."""

import json
from pathlib import Path

import pytest

from ops.profiling.shape_config import read_shape
from shared.contracts.errors import SettingsError
from tests.shapes import CONFIG, TINY
from tests.unit.ops.deployment import ROOT


def written(folder: Path, **changes: object) -> Path:
    """Write `CONFIG` with *changes*; fields with value None are omitted."""
    file = folder / "tiny" / "config.json"
    file.parent.mkdir(exist_ok=True)
    fields = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    file.write_text(json.dumps(fields))
    return file


def test_file_and_its_folder_give_the_same_shape(tmp_path: Path):
    file = written(tmp_path)

    assert read_shape(file) == TINY
    assert read_shape(file.parent) == TINY


def test_other_file_names_become_the_shapes_name(tmp_path: Path):
    file = written(tmp_path).rename(tmp_path / "small.json")

    assert read_shape(file).name == "small"


def test_bundled_shape_is_llama_3_8b():
    shape = read_shape(ROOT / "ops/sim/shapes/llama-3-8b.json")

    # 8.03 billion weights, without the norms in plain torch; 128 KiB of KV per token.
    assert shape.weight_bytes / 2 == pytest.approx(8.03e9, rel=1e-3)
    assert shape.num_layers * shape.layer_kv_bytes_per_token == 131072
    assert (shape.name, shape.dtype, shape.max_tokens) == ("llama-3-8b", "bfloat16", 8192)


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"head_dim": 32}, "head_size", 32),
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"torch_dtype": None}, "dtype", "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "dtype", "float16"),
        ({"max_position_embeddings": None}, "max_tokens", 2048),
        ({"sliding_window": 128}, "max_tokens_field", "sliding_window"),
        ({"sliding_window": 128, "use_sliding_window": False}, "max_tokens", 512),
        ({"model_type": "new-but-alike"}, "hidden_size", 64),
        ({"num_experts": 1}, "hidden_size", 64),
    ],
)
def test_fields_of_the_configuration_are_used(
    tmp_path: Path, changes: dict[str, object], attribute: str, value: object
):
    assert getattr(read_shape(written(tmp_path, **changes)), attribute) == value


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": 0}, "hidden_size: 0 must be from 1 to 65536"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not an integer"),
        ({"vocab_size": True}, "vocab_size: True is not an integer"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers: 1025 must be from 1 to 1024"),
        ({"head_dim": 512}, "head_dim: 512 must be from 1 to 256"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads: 4 is not a multiple of num_key_value_heads, 3",
        ),
        (
            {"hidden_size": 66},
            "head_dim is missing, and hidden_size, 66, is not a multiple of num_attention_heads, 4",
        ),
        ({"torch_dtype": "int8"}, "torch_dtype: 'int8' must be one of bfloat16, float16, float32"),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "model_type 'mixtral': num_local_experts means a mixture of experts, which",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "model_type 'llama': quantization_config means quantised weights",
        ),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            "model_type 't5': is_encoder_decoder means an encoder",
        ),
        (
            {"model_type": "llava", "hidden_size": None},
            "model_type 'llava' has no hidden_size; supported are granite, llama",
        ),
        (
            {"model_type": "gpt_neox", "hidden_act": "gelu", "rms_norm_eps": None},
            "model_type 'gpt_neox': hidden_act 'gelu', without rms_norm_eps, is not a gated MLP",
        ),
    ],
)
def test_unsupported_configuration_is_refused_with_its_field(
    tmp_path: Path, changes: dict[str, object], reported: str
):
    file = written(tmp_path, **changes)
    with pytest.raises(SettingsError) as refused:
        read_shape(file)

    assert str(refused.value).startswith(f"{file}: {reported}")


@pytest.mark.parametrize(
    ("content", "reported"),
    [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "must hold an object, not list")],
)
def test_file_that_is_not_a_configuration_is_refused(tmp_path: Path, content: bytes, reported: str):
    file = tmp_path / "config.json"
    file.write_bytes(content)

    with pytest.raises(SettingsError, match=reported):
        read_shape(file)


def test_folder_without_a_configuration_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"cannot read .*config\.json: No such file"):
        read_shape(tmp_path)
