"""Files of a model's directory, read with errors that name the file."""

from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry

FAST_TOKENIZER = "tokenizer.json"
SLOW_TOKENIZERS = (
    ("vocab.json", "merges.txt"),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("vocab.txt",),
)
"""Sets of files that `tokenizer.json` can be made of."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that configure the image processor of a model."""
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class _Index(msgspec.Struct, frozen=True):
    """Index of weights that are divided into several files."""

    weight_map: dict[str, str] = {}


class ModelFiles:
    """
    The directory of a model.

    Raises:
        SettingsError: The directory does not exist, or has no valid `config.json`.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise SettingsError(f"model directory {directory} does not exist")
        self.directory = directory
        if not (directory / "config.json").is_file():
            hint = ""
            if (directory / "adapter_config.json").is_file():
                hint = "; the directory is a LoRA adapter: add it with --adapter BASE=DIR"
            raise SettingsError(f"{directory} is not a model: config.json is missing{hint}")
        self.config = self.read("config.json")
        text = self.config.get("text_config")
        self.text_config: dict[str, Any] = text if isinstance(text, dict) else self.config
        """Configuration of the language model."""

    def has(self, name: str) -> bool:
        """Return whether the directory has the file *name*."""
        return (self.directory / name).is_file()

    def read(self, name: str) -> dict[str, Any]:
        """
        Content of the JSON file *name*; empty if the file is missing.

        Raises:
            SettingsError: The file is not a JSON object, or cannot be read.
        """
        path = self.directory / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise SettingsError(f"cannot read {path}: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: {error}") from error

    @property
    def model_type(self) -> str:
        """Model type of the language model."""
        return str(self.text_config.get("model_type") or self.config.get("model_type") or "")

    @property
    def slow_tokenizer(self) -> tuple[str, ...]:
        """Files of a tokenizer from which `tokenizer.json` can be made; empty if there are none."""
        return next((names for names in SLOW_TOKENIZERS if all(map(self.has, names))), ())

    def chat_template(self) -> str:
        """Text of the chat templates, with those for tools; empty if the model has none."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text("utf-8", errors="replace")
        found = self.read("tokenizer_config.json").get("chat_template")
        found = found or self.read("chat_template.json").get("chat_template")
        if isinstance(found, list):
            return "\n".join(str(each.get("template", "")) for each in found)
        return found if isinstance(found, str) else ""

    def missing_weights(self) -> tuple[str, ...]:
        """Names of weight files that the directory lacks; empty if the weights are complete."""
        for index in _INDICES:
            if self.has(index):
                try:
                    listed = msgspec.convert(self.read(index), _Index).weight_map.values()
                except msgspec.ValidationError as error:
                    raise SettingsError(f"{self.directory / index}: {error}") from error
                return tuple(name for name in sorted(set(listed)) if not self.has(name))
        found = [*self.directory.glob("*.safetensors"), *self.directory.glob("*.bin")]
        return () if found else ("model.safetensors",)


def require_tokenizer(files: ModelFiles) -> None:
    """
    Check that the model has a tokenizer.

    Raises:
        SettingsError: It has none.
    """
    if files.has(FAST_TOKENIZER) or files.slow_tokenizer:
        return
    known = ", ".join(" + ".join(names) for names in ((FAST_TOKENIZER,), *SLOW_TOKENIZERS))
    raise SettingsError(f"{files.directory} has no tokenizer; it needs one of: {known}")


def require_weights(files: ModelFiles) -> None:
    """
    Check that the weights of a model are complete.

    Raises:
        SettingsError: Weight files are missing; the message names them.
    """
    if missing := files.missing_weights():
        raise SettingsError(
            f"{files.directory} has no complete weights; missing: {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
        )


def has_processor(entry: ModelEntry) -> bool:
    """Return whether the model's directory configures an image processor."""
    return any((Path(entry.path) / name).is_file() for name in PROCESSOR_FILES)
