"""Digests of a model's files and settings, without its weights."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shared.contracts.models import ModelEntry
from shared.models.files.model_files import PROCESSOR_FILES

TOKENIZER_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "special_tokens_map.json", "chat_template.jinja"),
)


def model_digest(entry: ModelEntry) -> str:
    """
    Digest of everything that a gateway and an engine must have in common: the model's files, its
    task, its maximum length and its parsers.
    """
    return _digest(entry, ("config.json", *TOKENIZER_FILES, *PROCESSOR_FILES))


def tokenizer_digest(entry: ModelEntry) -> str:
    """Digest of everything that `model_digest` covers except the configuration `config.json`."""
    return _digest(entry, (*TOKENIZER_FILES, *PROCESSOR_FILES))


def _digest(entry: ModelEntry, files: Iterable[str]) -> str:
    """Digest of the settings and of those *files* that exist."""
    settings = (entry.task, entry.max_model_len, entry.tool_parser, entry.reasoning_parser)
    found = hashlib.sha256(msgspec.json.encode(settings))
    for name in files:
        path = Path(entry.path) / name
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"\n{name} {content}".encode())
    return found.hexdigest()[:16]
