"""Derives registry entries from the files of models and adapters."""

import re
from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry, ModelTask
from shared.models.files.model_files import FAST_TOKENIZER, ModelFiles, require_tokenizer
from shared.models.files.parsers import reasoning_parser_of, tool_parser_of
from shared.models.files.sizes import ENCODERS, weight_bytes

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Names of the maximum length in `config.json`, as in vLLM."""
_SCALED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "default", "mrope"})
"""Types of rotary embeddings whose maximum length already contains their factor, as in vLLM."""
_SENTENCE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_DEFAULT_LENGTH = 2048
_COMMIT = re.compile("[0-9a-f]{40}")


def derive_entry(
    directory: Path, *, name: str | None = None, task: ModelTask | None = None
) -> ModelEntry:
    """
    Registry entry of the model in *directory*, from the model's own files.

    Args:
        directory: Directory in the format of Hugging Face.
        name: Name of the model; None: the name of the directory.
        task: Task of the model; None: the task that its files determine.

    Raises:
        SettingsError: The directory is missing, lacks `config.json` or a tokenizer, or a file is
            invalid.
    """
    files = ModelFiles(directory)
    require_tokenizer(files)
    architecture = _architecture(files)
    task = task or _task(files, architecture)
    is_generating = task == "generate"
    path = directory.absolute()
    entry = ModelEntry(
        name=ModelName(name or directory.resolve().name),
        path=str(path),
        architecture=architecture,
        task=task,
        max_model_len=_max_model_len(files),
        eos_token_ids=_eos_token_ids(files) if is_generating else (),
        revision=_revision(directory),
        tool_parser=tool_parser_of(files) if is_generating else None,
        reasoning_parser=reasoning_parser_of(files) if is_generating else None,
    )
    return msgspec.structs.replace(entry, weight_bytes=weight_bytes(entry))


def _architecture(files: ModelFiles) -> str:
    names = files.config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise SettingsError(
            f"{files.directory / 'config.json'} has no `architectures`: add the name of the "
            "model's class, e.g. LlamaForCausalLM"
        )
    return names[0]


def _task(files: ModelFiles, architecture: str) -> ModelTask:
    """The task for which the model was trained, as vLLM selects it."""
    if architecture.endswith(("ForSequenceClassification", "RewardModel")):
        return "classify"
    if architecture.endswith("ForTokenClassification"):
        return "token_classify"
    if files.has("modules.json") or files.model_type in ENCODERS:
        return "embed"
    return "generate"


def _max_model_len(files: ModelFiles) -> int:
    """Maximum length as vLLM derives it, without the limit of a device's memory."""
    for name in _SENTENCE_CONFIGS:
        if isinstance(length := files.read(name).get("max_seq_length"), int):
            return length
    config = files.text_config
    lengths = [config[name] for name in _LENGTHS if isinstance(config.get(name), int)]
    length = min(lengths, default=_DEFAULT_LENGTH)
    if "roberta" in files.model_type:
        length -= int(config.get("pad_token_id") or 0) + 1  # positions begin after the padding
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    if kind == "longrope":
        return int(config.get("original_max_position_embeddings") or length)
    if kind not in _SCALED and "gemma3" not in files.model_type:
        length = int(length * (rotary.get("factor") or 1.0))
    return length


def _eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """Tokens that end an answer, as in vLLM: those of the generation and of the tokenizer."""
    configs = (files.read("generation_config.json"), files.config, files.text_config)
    found: Any = next(filter(_is_ids, (each.get("eos_token_id") for each in configs)), [])
    ids = found if isinstance(found, list) else [found]
    token = _tokenizer_eos(files)
    return tuple(dict.fromkeys([*ids, *([] if token is None else [token])]))


def _is_ids(value: object) -> bool:
    return isinstance(value, int | list) and value != []


def _tokenizer_eos(files: ModelFiles) -> int | None:
    """Id of the tokenizer's token for the end of a sequence, if the files have it."""
    name = files.read("tokenizer_config.json").get("eos_token")
    text = name.get("content") if isinstance(name, dict) else name
    added = files.read(FAST_TOKENIZER).get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if text is not None and token.get("content") == text:
            return int(token["id"])
    return None


def _revision(directory: Path) -> str | None:
    """Commit of a directory in the cache of the hub; None for other directories."""
    name = directory.resolve().name
    return name if _COMMIT.fullmatch(name) else None


class AdapterFacts(msgspec.Struct, frozen=True):
    """A LoRA adapter, from its `adapter_config.json`."""

    directory: Path
    rank: int
    base: str | None
    """Name of the base model for which the adapter was trained."""


def adapter_facts(directory: Path) -> AdapterFacts:
    """
    Read the configuration of the LoRA adapter in *directory*.

    Raises:
        SettingsError: The directory or one of its two files is missing, or the adapter is not a
            LoRA adapter that vLLM loads.
    """
    path = directory / "adapter_config.json"
    if not directory.is_dir():
        raise SettingsError(f"adapter directory {directory} does not exist")
    try:
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise SettingsError(f"{directory} is not an adapter: {path.name} is missing") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    if config.get("peft_type", "LORA") != "LORA":
        raise SettingsError(f"{path}: peft_type is {config['peft_type']!r}; only LORA is served")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise SettingsError(f"{path}: `r`, the rank, must be an integer of at least 1")
    weights = ("adapter_model.safetensors", "adapter_model.bin")
    if not any((directory / name).is_file() for name in weights):
        raise SettingsError(f"{directory} has no weights; it needs {weights[0]}")
    base = config.get("base_model_name_or_path")
    return AdapterFacts(
        directory=directory, rank=rank, base=base if isinstance(base, str) else None
    )
