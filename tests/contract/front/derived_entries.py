"""Derived registry entries agree with vLLM; run by `test_in_process_of_its_own.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from services.engine_core.models import unsupported_reason
from shared.models.files.derive import derive_entry
from shared.models.files.parsers import REASONING_RULES, TOOL_RULES
from shared.models.tiny import make_tiny_models
from tests.queued import MODEL


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny_models(tmp_path, weights=False)
    return tmp_path / MODEL


def configure(model: Path, **fields: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("rule", TOOL_RULES, ids=lambda rule: rule.parser)
def test_vllm_has_each_tool_parser(rule: Any) -> None:
    assert ToolParserManager.get_tool_parser(rule.parser)


@pytest.mark.parametrize("rule", REASONING_RULES, ids=lambda rule: rule.parser)
def test_vllm_has_each_reasoning_parser(rule: Any) -> None:
    assert ReasoningParserManager.get_reasoning_parser(rule.parser)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": 1000},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 2048}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 4096}},
    ],
    ids=["plain", "linear", "linear, older name", "llama3", "yarn"],
)  # fmt: skip
def test_the_derived_maximum_length_is_that_of_vllm(model: Path, fields: dict[str, Any]) -> None:
    configure(model, **fields)
    config = AsyncEngineArgs(model=str(model), skip_tokenizer_init=True).create_model_config()

    assert derive_entry(model).max_model_len == config.max_model_len


def test_an_unsupported_architecture_is_refused_with_vllms_reason(model: Path) -> None:
    assert unsupported_reason(derive_entry(model)) is None
    configure(model, architectures=["NoSuchModel"], model_type="no_such_type")

    reason = unsupported_reason(derive_entry(model))
    assert reason is not None
    assert "no_such_type" in reason or "NoSuchModel" in reason
