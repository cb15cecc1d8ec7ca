"""Finds the directory of a model, in the file system or in the Hugging Face hub."""

import re
from pathlib import Path

from shared.contracts.errors import SettingsError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_TEXT = ["*.json", "*.txt", "*.jinja", "*.model"]
_IGNORED = ["original/*", "onnx/*", "openvino/*", "*.gguf", "*.onnx", "*.pth"]


def locate(source: str) -> Path:
    """
    Directory of the model *source*: a directory, or an id `org/name` or `org/name@revision` of the
    hub, which is downloaded to the hub's cache unless it is there.

    Raises:
        SettingsError: The directory does not exist, or the model cannot be downloaded.
    """
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise SettingsError(f"{source} is a file; name the directory of a model")
    if source.startswith((".", "/", "~")) or _HUB_ID.fullmatch(source) is None:
        raise SettingsError(
            f"model directory {source} does not exist, and {source!r} is not an id of the hub, "
            "which has the form org/name"
        )
    return _downloaded(source)


def _downloaded(source: str) -> Path:
    # Imported here: the import takes half a second, and only downloads need it.
    try:
        import huggingface_hub  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(
            f"{source} is not a directory, and the package huggingface_hub, which downloads "
            "models, is not installed"
        ) from error
    repo, _, revision = source.partition("@")

    def download(patterns: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
            )
        )

    try:
        directory = download([*_TEXT, "*.safetensors"])
        if not any(directory.glob("*.safetensors")):
            directory = download([*_TEXT, "*.bin"])
    except Exception as error:  # the library and its HTTP client raise many unrelated types
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(
            f"{source} is not a directory here and cannot be downloaded from the hub: {reason[0]}"
            "; check the id and the network, or give a directory"
        ) from error
    return directory
