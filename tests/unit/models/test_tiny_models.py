"""Tiny models: files on disk, and conditions for rebuilding them."""

import json
from pathlib import Path

import msgspec
import pytest

from shared.contracts.requests import ChatMessage
from shared.models.files.derive import adapter_facts
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, main, make_tiny_models
from shared.models.tiny_tokenizer import VOCAB_SIZE
from shared.models.tokenizer import Tokenizer
from tests import requirements


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    directory = tmp_path_factory.mktemp("tiny")
    return ModelRegistry.load(make_tiny_models(directory, weights=False))


def test_the_registry_lists_every_tiny_model_with_its_files(registry: ModelRegistry) -> None:
    assert set(TINY_MODELS) == set(registry.bases)
    for base in registry.bases:
        files = {path.name for path in Path(registry.entry(base).path).iterdir()}
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= files


def test_the_configuration_covers_the_registered_length(registry: ModelRegistry) -> None:
    for base in registry.bases:
        entry = registry.entry(base)
        config = json.loads((Path(entry.path) / "config.json").read_text())
        assert config["architectures"] == [entry.architecture]
        assert config["max_position_embeddings"] >= entry.max_model_len
        assert tuple(config["eos_token_id"]) == entry.eos_token_ids


def test_every_token_of_the_model_is_in_its_tokenizer(registry: ModelRegistry) -> None:
    tokenizer = Tokenizer.load(Path(registry.entry(registry.bases[0]).path))

    assert tokenizer.vocab_size == VOCAB_SIZE


def test_any_text_survives_the_tokenizer(registry: ModelRegistry) -> None:
    tokenizer = Tokenizer.load(Path(registry.entry(registry.bases[0]).path))
    text = "Every token waits.\n\té日本 🎉\x00"

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_names_the_roles_and_prompts_the_assistant(registry: ModelRegistry) -> None:
    tokenizer = Tokenizer.load(Path(registry.entry(registry.bases[0]).path))
    bos, end, system, user, assistant = 1, 3, 4, 5, 6
    chat = (
        ChatMessage(role="developer", content="a"),
        ChatMessage(role="user", content=[{"type": "text", "text": "b"}]),
    )
    a, b = (tokenizer.encode(text)[1] for text in "ab")

    assert tokenizer.encode(chat) == (bos, system, a, end, user, b, end, assistant)


def test_existing_models_are_not_rebuilt(tmp_path: Path) -> None:
    make_tiny_models(tmp_path, weights=False)
    before = (tmp_path / "tiny-llama" / "config.json").stat().st_ino
    make_tiny_models(tmp_path, weights=False)

    assert (tmp_path / "tiny-llama" / "config.json").stat().st_ino == before


def test_stale_models_are_rebuilt(tmp_path: Path) -> None:
    make_tiny_models(tmp_path, weights=False)
    stamp = tmp_path / "tiny-llama" / "stamp.json"
    good = stamp.read_bytes()
    stamp.write_bytes(msgspec.json.encode({"version": 0, "weights": False}))
    make_tiny_models(tmp_path, weights=False)

    assert stamp.read_bytes() == good
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_weights_are_added_to_models_without_them_and_deterministic(tmp_path: Path) -> None:
    requirements.module("safetensors")
    first, second = tmp_path / "first", tmp_path / "second"
    make_tiny_models(first, weights=False)
    make_tiny_models(first)
    make_tiny_models(second)
    for name, architecture in TINY_MODELS.items():
        weights = (first / name / "model.safetensors").read_bytes()
        assert weights == (second / name / "model.safetensors").read_bytes()
        assert architecture.weight_bytes < len(weights) < architecture.weight_bytes + 10_000


def test_the_command_prints_the_path_of_the_registry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--no-weights", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["registry"] == str(tmp_path / "registry.json")


def test_adapters_fit_their_base(tmp_path: Path):
    pytest.importorskip("safetensors")
    assert main(["--out", str(tmp_path), "--no-weights", "--adapters", "2"]) == 0
    found = [adapter_facts(path) for path in sorted((tmp_path / "adapters").iterdir())]

    assert [each.directory.name for each in found] == ["adapter-1", "adapter-2"]
    assert [each.rank for each in found] == [8, 8]
