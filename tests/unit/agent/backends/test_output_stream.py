"""Outputs of a run that wait for a slow reader."""

from services.agent.backends.base import EngineOutput
from services.agent.backends.stream import OutputStream
from shared.contracts.requests import FinishReason

STOP = FinishReason.STOP


async def read(*outputs: EngineOutput) -> list[EngineOutput]:
    stream = OutputStream()
    for output in outputs:
        stream.push(output)
    return [output async for output in stream.outputs()]


async def test_waiting_outputs_are_merged():
    ended = EngineOutput(token_ids=(2, 3), finish_reason=STOP)

    assert await read(EngineOutput(token_ids=(1,), cached_tokens=4), ended) == [
        EngineOutput(token_ids=(1, 2, 3), finish_reason=STOP, cached_tokens=4)
    ]


async def test_answers_of_a_call_are_merged_separately_and_the_response_is_last():
    outputs = (
        EngineOutput(token_ids=(), child=0, prompt_tokens=5),
        EngineOutput(token_ids=(1,), child=0),
        EngineOutput(token_ids=(7,), child=1, finish_reason=STOP),
        EngineOutput(token_ids=(2,), child=0, finish_reason=STOP),
        EngineOutput(token_ids=(), response=b"{}"),
        EngineOutput(token_ids=(9,), child=0),
    )

    assert await read(*outputs) == [
        EngineOutput(token_ids=(1, 2), child=0, prompt_tokens=5, finish_reason=STOP),
        EngineOutput(token_ids=(7,), child=1, finish_reason=STOP),
        EngineOutput(token_ids=(), response=b"{}"),
    ]
