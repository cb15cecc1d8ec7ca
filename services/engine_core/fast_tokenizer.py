"""Makes `tokenizer.json` for models whose tokenizer has an older format."""

import importlib
import sys
from pathlib import Path

from transformers import AutoTokenizer

from shared.models.files.model_files import FAST_TOKENIZER

_SCHEMA = "sentencepiece.sentencepiece_model_pb2"


def write_fast_tokenizer(source: Path, target: Path) -> None:
    """
    Write `tokenizer.json` with the tokenizer of the model in *source* to the directory *target*.

    Raises:
        Exception: Any error of transformers for a tokenizer that it cannot read or convert.
    """
    _require_schema()
    tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    tokenizer.backend_tokenizer.save(str(target / FAST_TOKENIZER))


def _require_schema() -> None:
    """
    Make transformers use its own schema of sentencepiece files, if that of sentencepiece needs a
    newer protobuf than vLLM allows.
    """
    try:
        importlib.import_module(_SCHEMA)
    except Exception:  # noqa: BLE001 - protobuf raises an error type of its own
        own = importlib.import_module("transformers.utils.sentencepiece_model_pb2_new")
        sys.modules[_SCHEMA] = own
