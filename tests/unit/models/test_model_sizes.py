"""Sizes of models in bytes, from the registry and the model files."""

import json
from pathlib import Path

import pytest

from shared.contracts.models import ModelEntry
from shared.models.files.sizes import kv_bytes_per_token, weight_bytes
from tests.queued import MODEL


def entry(path: Path, num_bytes: int = 0) -> ModelEntry:
    return ModelEntry(
        name=MODEL, path=str(path), architecture="x", max_model_len=64, weight_bytes=num_bytes
    )


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (
            {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "hidden_size": 4096, "torch_dtype": "bfloat16"},
            131_072,
        ),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "head_dim": 32,
             "dtype": "float32"},
            2 * 2 * 4 * 32 * 4,
        ),
        ({}, 0),
    ],
    ids=["Llama 3 8B", "without grouped queries", "says nothing"],
)  # fmt: skip
def test_kv_bytes_per_token_follow_from_the_models_shape(
    tmp_path: Path, config: dict[str, object], num_bytes: int
):
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert kv_bytes_per_token(entry(tmp_path)) == num_bytes


def test_model_without_files_has_unknown_sizes(tmp_path: Path):
    assert kv_bytes_per_token(entry(tmp_path / "nowhere")) == 0
    assert weight_bytes(entry(tmp_path / "nowhere")) == 0


def test_weight_sizes_come_from_the_registry_or_the_files(tmp_path: Path):
    for number in range(2):
        (tmp_path / f"part-{number}.safetensors").write_bytes(b"x" * 100)

    assert weight_bytes(entry(tmp_path)) == 200
    assert weight_bytes(entry(tmp_path, 7)) == 7
