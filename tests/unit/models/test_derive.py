"""Registry entries that are derived from the files of models and adapters."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.errors import SettingsError
from shared.models.files import hub
from shared.models.files.derive import adapter_facts, derive_entry
from shared.models.files.model_files import ModelFiles, require_weights
from shared.models.tiny import TINY_IMAGE_MODELS, TINY_MODELS, TINY_POOLING_MODELS, make_tiny_models
from tests.queued import MODEL

HERMES = (
    '{% if tools %}<tools></tools><tool_call>{"name": n, "arguments": a}</tool_call>{% endif %}'
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny_models(tmp_path, weights=False)
    return tmp_path / MODEL


def change(directory: Path, name: str, **fields: Any) -> None:
    """Set fields of a JSON file; None removes a field."""
    path = directory / name
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= fields
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("models", [TINY_MODELS, TINY_IMAGE_MODELS], ids=["text", "images"])
def test_a_derived_entry_agrees_with_a_written_one(tmp_path: Path, models: Any):
    make_tiny_models(tmp_path, weights=False, models=models)
    for name, architecture in models.items():
        entry = derive_entry(tmp_path / name)

        assert entry.name == name
        assert entry.architecture == architecture.architecture
        assert entry.eos_token_ids == (2, 3)
        assert entry.max_model_len == 16384
        assert entry.task == "generate"


def test_the_class_of_a_classifier_determines_its_task(tmp_path: Path):
    make_tiny_models(tmp_path, weights=False, models=TINY_POOLING_MODELS)
    entry = derive_entry(tmp_path / "tiny-score")

    assert entry.task == "classify"
    assert entry.eos_token_ids == ()


def test_files_of_sentence_transformers_make_an_embedder(model: Path):
    (model / "modules.json").write_text("[]")
    change(model, "sentence_bert_config.json", max_seq_length=256)
    entry = derive_entry(model)

    assert (entry.task, entry.max_model_len) == ("embed", 256)
    assert derive_entry(model, task="token_embed").task == "token_embed"


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_position_embeddings": 1000}, 1000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"type": "linear", "factor": 4}}, 4000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"type": "yarn", "factor": 4}}, 1000),
        ({"max_position_embeddings": None, "n_positions": 512}, 512),
        ({"max_position_embeddings": None}, 2048),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        (
            {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
             "rope_scaling": {"type": "longrope"}},
            4096,
        ),
    ],
    ids=["plain", "linear", "yarn", "GPT-2", "none", "RoBERTa", "longrope"],
)  # fmt: skip
def test_the_maximum_length_follows_vllms_rules(model: Path, fields: dict[str, Any], length: int):
    change(model, "config.json", **fields)

    assert derive_entry(model).max_model_len == length


def test_ends_of_answers_come_from_the_generation_and_the_tokenizer(model: Path):
    change(model, "generation_config.json", eos_token_id=7)

    assert derive_entry(model).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen2", HERMES, "hermes", None),
        ("qwen3", HERMES + "{% if enable_thinking %}<think>{% endif %}", "hermes", "qwen3"),
        ("qwen3", "<tool_call><function=x><parameter=y>", "qwen3_coder", None),
        ("llama", 'ipython {"name": n, "parameters": p}', "llama3_json", None),
        ("gpt2", HERMES, None, None),
        ("qwen2", "plain chat", None, None),
    ],
    ids=["Qwen2.5", "Qwen3", "Qwen3-Coder", "Llama 3", "unknown type", "no tools"],
)
def test_parsers_need_a_known_type_and_its_markers(
    model: Path, model_type: str, template: str, tools: str | None, reasoning: str | None
):
    change(model, "config.json", model_type=model_type)
    (model / "chat_template.jinja").write_text(template)
    entry = derive_entry(model)

    assert (entry.tool_parser, entry.reasoning_parser) == (tools, reasoning)


@pytest.mark.parametrize(
    ("break_model", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
        (lambda path: change(path, "config.json", architectures=None), "architectures"),
    ],
    ids=["directory", "config", "tokenizer", "invalid config", "architecture"],
)
def test_errors_name_what_is_missing(model: Path, break_model: Any, message: str):
    break_model(model)
    with pytest.raises(SettingsError, match=message):
        derive_entry(model)


def test_incomplete_weights_are_named(model: Path):
    with pytest.raises(SettingsError, match=r"model\.safetensors"):
        require_weights(ModelFiles(model))

    change(model, "model.safetensors.index.json", weight_map={"a": "one.safetensors", "b": "two"})
    (model / "one.safetensors").touch()
    with pytest.raises(SettingsError, match="missing: two"):
        require_weights(ModelFiles(model))

    (model / "two").touch()
    require_weights(ModelFiles(model))


def test_an_adapters_rank_and_files_are_checked(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"adapter_config\.json is missing"):
        adapter_facts(tmp_path)

    change(tmp_path, "adapter_config.json", r=8, base_model_name_or_path="base")
    with pytest.raises(SettingsError, match=r"adapter_model\.safetensors"):
        adapter_facts(tmp_path)

    (tmp_path / "adapter_model.safetensors").touch()
    assert (adapter_facts(tmp_path).rank, adapter_facts(tmp_path).base) == (8, "base")

    change(tmp_path, "adapter_config.json", peft_type="IA3")
    with pytest.raises(SettingsError, match="only LORA"):
        adapter_facts(tmp_path)


def test_a_directory_is_preferred_to_a_hub_id(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(model.parent.parent)

    assert hub.locate(f"{model.parent.name}/{model.name}").resolve() == model


@pytest.mark.parametrize("source", ["nowhere", "./org/name", "/nowhere/model"])
def test_a_missing_directory_is_not_looked_up_in_the_hub(source: str):
    with pytest.raises(SettingsError, match="does not exist"):
        hub.locate(source)


def test_a_download_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def refuse(repo: str, **_options: Any) -> str:
        raise OSError(f"no route to {repo}\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        SettingsError, match="cannot be downloaded from the hub: no route to org/m;"
    ):
        hub.locate("org/m")


def test_a_downloads_commit_is_the_revision(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    commit = "0123456789abcdef" * 2 + "01234567"
    (model / "model.safetensors").touch()
    snapshot = shutil.move(model, tmp_path / commit)
    asked: list[tuple[str, str | None]] = []

    def download(repo: str, *, revision: str | None, **_patterns: Any) -> str:
        asked.append((repo, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    entry = derive_entry(hub.locate("org/model@v1"), name="model")

    assert asked == [("org/model", "v1")]
    assert entry.revision == commit
