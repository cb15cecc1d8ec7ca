"""Makes registry entries of model directories and hub ids."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry, ModelTask
from shared.models.files.derive import adapter_facts, derive_entry
from shared.models.files.hub import locate
from shared.models.files.model_files import (
    FAST_TOKENIZER,
    ModelFiles,
    require_tokenizer,
    require_weights,
)
from shared.models.registry_edit import registry_edit


def parse_named(text: str) -> tuple[str, str | None]:
    """Parts of `SOURCE` or `SOURCE=NAME`; a directory whose name contains `=` is a source."""
    if "=" not in text or Path(text).expanduser().is_dir():
        return text, None
    source, _, name = text.rpartition("=")
    if not source or not name:
        raise SettingsError(f"{text!r} has not the form SOURCE or SOURCE=NAME")
    return source, name


def parse_adapter(text: str) -> tuple[str, Path, str]:
    """
    Base, directory and name of an adapter `BASE=DIR` or `BASE=DIR=NAME`.

    Raises:
        SettingsError: The text has another form, or the directory is not a LoRA adapter.
    """
    base, _, rest = text.partition("=")
    if not base or not rest:
        raise SettingsError(f"--adapter {text!r} has not the form BASE=DIR or BASE=DIR=NAME")
    source, name = parse_named(rest)
    directory = Path(source).expanduser()
    adapter_facts(directory)
    return base, directory, name or directory.resolve().name


def parse_engine_args(texts: Iterable[str]) -> dict[str, Any]:
    """
    Arguments of vLLM of `NAME=VALUE` each; a value is JSON, or else text.

    Raises:
        SettingsError: One has another form.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, has_value, value = text.partition("=")
        name = name.replace("-", "_")
        if not has_value or not name.isidentifier():
            raise SettingsError(
                f"--engine-arg {text!r} has not the form NAME=VALUE, e.g. tensor_parallel_size=2"
            )
        try:
            arguments[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            arguments[name] = value
    return arguments


def entry_of(
    text: str,
    root: Path,
    *,
    max_model_len: int | None = None,
    task: ModelTask | None = None,
    engine_args: Mapping[str, Any] = MappingProxyType({}),
) -> ModelEntry:
    """
    Registry entry of the model `SOURCE` or `SOURCE=NAME`.

    A model without `tokenizer.json` gets a directory below *root* with links to its files and a
    `tokenizer.json` that is made of its tokenizer.

    Args:
        text: Directory or hub id of the model, and its name.
        root: Directory of the registry file.
        max_model_len: Limit that replaces the model's own, in tokens, if it is smaller.
        task: Task of the model; None: the task that its files determine.
        engine_args: Arguments of vLLM for the model.

    Raises:
        SettingsError: The model cannot be found or read; the message says what is missing.
    """
    source, name = parse_named(text)
    directory = locate(source)
    is_download = not Path(source).expanduser().is_dir()
    name = name or (source.partition("@")[0].split("/")[-1] if is_download else None)
    files = ModelFiles(directory)
    require_tokenizer(files)
    entry = derive_entry(directory, name=name, task=task)
    if not files.has(FAST_TOKENIZER):
        entry = _with_fast_tokenizer(entry, root)
    if max_model_len is not None:
        entry = msgspec.structs.replace(
            entry, max_model_len=min(entry.max_model_len, max_model_len)
        )
    return msgspec.structs.replace(entry, engine_args=entry.engine_args | dict(engine_args))


def _with_fast_tokenizer(entry: ModelEntry, root: Path) -> ModelEntry:
    """The entry with a directory that also has `tokenizer.json`."""
    source = Path(entry.path)
    target = (root / "prepared" / entry.name).absolute()
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = target / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    try:
        # Imported here, since the import of transformers takes seconds.
        from services.engine_core.fast_tokenizer import write_fast_tokenizer  # noqa: PLC0415

        write_fast_tokenizer(source, target)
    except ImportError as error:
        raise SettingsError(
            f"{source} has no {FAST_TOKENIZER}; it can be made of the model's other files where "
            "transformers is installed, which comes with vLLM"
        ) from error
    except Exception as error:  # transformers raises many types for tokenizers it cannot read
        raise SettingsError(
            f"{source} has no {FAST_TOKENIZER}, and transformers cannot make it of the model's "
            f"other files: {error}"
        ) from error
    made = derive_entry(target, name=entry.name, task=entry.task)
    return msgspec.structs.replace(made, revision=entry.revision)


def write_model_registry(
    models: Iterable[str],
    path: Path,
    *,
    engine: str,
    adapters: Iterable[str] = (),
    max_model_len: int | None = None,
    engine_args: Iterable[str] = (),
) -> Path:
    """
    Write a registry of *models*, each `SOURCE` or `SOURCE=NAME`, to the file *path*.

    Args:
        engine: Backend of the engines; simulated engines need no weights.
        adapters: LoRA adapters, each `BASE=DIR` or `BASE=DIR=NAME`.
        max_model_len: Limit of each model, in tokens, if it is smaller than the model's own.
        engine_args: Arguments of vLLM for each model, each `NAME=VALUE`.

    Raises:
        SettingsError: A model, an adapter or an argument cannot be found or read, or two have one
            name.
    """
    root = path.absolute().parent
    arguments = parse_engine_args(engine_args)
    entries = [
        entry_of(each, root, max_model_len=max_model_len, engine_args=arguments) for each in models
    ]
    if engine != "simulated":
        for entry in entries:
            require_weights(ModelFiles(Path(entry.path)))
    path.unlink(missing_ok=True)
    with registry_edit(path) as edit:
        for entry in entries:
            edit.add(entry)
        for base, directory, name in map(parse_adapter, adapters):
            edit.add_adapter(base, name, directory)
    return path
