"""Checks of registry entries: missing files, and the memory that a model needs."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.files.derive import adapter_facts
from shared.models.files.model_files import ModelFiles, require_tokenizer, require_weights
from shared.models.files.sizes import kv_bytes_per_token, weight_bytes
from shared.models.host_memory import available_host_bytes
from shared.models.tokenizer import Tokenizer

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class Memory(msgspec.Struct, frozen=True):
    """Memory of a device for weights and KV."""

    device: str
    num_bytes: int


class ModelCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking one model; sizes are in bytes."""

    model: str
    usable: bool
    """True if no problem was found and one request of maximum length fits."""
    problems: tuple[str, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    request_bytes: int
    """KV of one request of `max_model_len` tokens."""
    max_model_len: int
    memory_bytes: int
    concurrent_requests: int | None
    """Requests of `max_model_len` tokens that fit at once; None if the size of KV is unknown."""


def parse_memory(text: str) -> int:
    """
    Bytes of a size such as `24GiB`.

    Raises:
        SettingsError: The text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise SettingsError(f"--memory {text!r} is not a size; write e.g. 24GiB or 80GB")
    return int(float(match[1]) * unit)


def detected_memory() -> Memory:
    """
    Memory of the first GPU; without a GPU the host memory that is available.

    Raises:
        SettingsError: Neither can be read.
    """
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
        name, _, mebibytes = found.stdout.partition("\n")[0].rpartition(",")
        if found.returncode == 0 and mebibytes.strip().isdigit():
            return Memory(name.strip(), int(mebibytes) << 20)
    return Memory("cpu", available_host_bytes(instead="give --memory"))


def check_model(entry: ModelEntry, memory: Memory) -> ModelCheck:
    """Check a registry entry whose directories are absolute."""
    problems = tuple(dict.fromkeys(_problems(entry)))
    weights, per_token = weight_bytes(entry), kv_bytes_per_token(entry)
    request = per_token * entry.max_model_len
    free = memory.num_bytes - weights
    fitting = None if not request else max(0, free // request)
    if free < request:
        too_large = (
            f"{weights} bytes of weights and {request} bytes of KV for one request of "
            f"{entry.max_model_len} tokens exceed {memory.num_bytes} bytes: lower max_model_len"
        )
        problems = (*problems, too_large)
    return ModelCheck(
        model=entry.name,
        usable=not problems,
        problems=problems,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        request_bytes=request,
        max_model_len=entry.max_model_len,
        memory_bytes=memory.num_bytes,
        concurrent_requests=fitting,
    )


def _problems(entry: ModelEntry) -> Iterator[str]:
    """Messages about files that are missing or unusable, and about vLLM's refusal."""
    if entry.takes_bodies:
        return  # its servers have the files
    try:
        files = ModelFiles(Path(entry.path))
    except SettingsError as error:
        yield str(error)
        return
    for check in (require_tokenizer, require_weights):
        try:
            check(files)
        except SettingsError as error:
            yield str(error)
    try:
        Tokenizer.load(files.directory)
    except SettingsError as error:
        yield str(error)
    for directory in entry.adapters.values():
        try:
            adapter_facts(Path(directory))
        except SettingsError as error:
            yield str(error)
    if (reason := _engine_refusal(entry)) is not None:
        yield f"vLLM does not serve the model: {reason}"


def _engine_refusal(entry: ModelEntry) -> str | None:
    """Why the installed vLLM does not serve the model; None also if vLLM is not installed."""
    if find_spec("vllm") is None:
        return None
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported here, since the import of vLLM takes seconds.
    from services.engine_core.models import unsupported_reason  # noqa: PLC0415

    return unsupported_reason(entry)
