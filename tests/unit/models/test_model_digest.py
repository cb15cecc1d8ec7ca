"""Digest of a model's text, which engines in one process must have in common."""

from pathlib import Path

import msgspec
import pytest

from shared.contracts.models import ModelEntry
from shared.models.digest import tokenizer_digest
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from tests.queued import MODEL


@pytest.fixture
def entry(tmp_path: Path) -> ModelEntry:
    return ModelRegistry.load(make_tiny_models(tmp_path, weights=False)).entry(MODEL)


def test_equal_files_have_equal_digests(entry: ModelEntry, tmp_path: Path):
    copy = tmp_path / "copy"
    other = ModelRegistry.load(make_tiny_models(copy, weights=False)).entry(MODEL)

    assert tokenizer_digest(other) == tokenizer_digest(entry)


@pytest.mark.parametrize(
    "field", [{"reasoning_parser": "qwen3"}, {"tool_parser": "hermes"}, {"max_model_len": 64}]
)
def test_parsers_and_length_change_the_digest(entry: ModelEntry, field: dict[str, object]):
    assert tokenizer_digest(msgspec.structs.replace(entry, **field)) != tokenizer_digest(entry)


def test_another_tokenizer_changes_the_digest(entry: ModelEntry):
    before = tokenizer_digest(entry)
    tokenizer = Path(entry.path) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")

    assert tokenizer_digest(entry) != before
