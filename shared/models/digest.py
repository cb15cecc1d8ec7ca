"""Digests of a model's files and settings, without its weights."""

import hashlib
from pathlib import Path

import msgspec

from shared.contracts.models import ModelEntry
from shared.models.files.model_files import PROCESSOR_FILES

TOKENIZER_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "special_tokens_map.json", "chat_template.jinja"),
)


def tokenizer_digest(entry: ModelEntry) -> str:
    """
    Digest of a model's text: the files of its tokenizer, its task, its maximum length and its
    parsers.
    """
    settings = (entry.task, entry.max_model_len, entry.tool_parser, entry.reasoning_parser)
    found = hashlib.sha256(msgspec.json.encode(settings))
    for name in (*TOKENIZER_FILES, *PROCESSOR_FILES):
        path = Path(entry.path) / name
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"\n{name} {content}".encode())
    return found.hexdigest()[:16]
