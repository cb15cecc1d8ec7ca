"""Grammars are checked outside the event loop, once."""

import threading
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from services.engine_core.engine_client import CheckedInputs

GRAMMAR = StructuredOutputsParams(regex="[a-z]+")


@pytest.mark.parametrize(("grammar", "in_thread"), [(GRAMMAR, True), (None, False)])
async def test_a_grammar_is_checked_once_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, grammar: StructuredOutputsParams | None, *, in_thread: bool
):
    threads: list[threading.Thread] = []

    def validate(*_given: Any) -> bool:
        threads.append(threading.current_thread())
        return True

    monkeypatch.setattr(InputProcessor, "__init__", lambda *_given: None)
    monkeypatch.setattr(InputProcessor, "_validate_params", validate)
    inputs = CheckedInputs(None, None)  # type: ignore[arg-type]  # nothing reads them
    params = SamplingParams(structured_outputs=grammar)
    for _ in range(2):
        async with inputs.checked(params, ("generate",)):
            assert inputs._validate_params(params, ("generate",)) is True
    of_other = inputs._validate_params(SamplingParams(structured_outputs=GRAMMAR), ())

    assert of_other is True
    assert len(threads) == 3
    is_loop = [each is threading.current_thread() for each in threads]
    assert is_loop == [not in_thread, not in_thread, True]
