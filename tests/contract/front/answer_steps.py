"""Parts of answers become outputs of an engine core; vLLM reads the same text from them."""

from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists

from ops.generate.replies import completed
from services.engine_core.encoding import encode_output
from services.engine_core.steps import AnswerSteps
from shared.contracts.errors import ContractError
from shared.contracts.requests import (
    FinishReason,
    RequestCompleted,
    StepDetails,
    Tokens,
)
from shared.producer.effects import NewTokens

STOP, EOS = 50, 2


def request(**sampling: Any) -> Any:

    params = SamplingParams(stop_token_ids=[STOP], **sampling)
    params.update_from_generation_config({}, EOS)
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def part(offset: int, *token_ids: int, details: tuple[StepDetails, ...] = ()) -> NewTokens:
    return NewTokens(offset=offset, token_ids=token_ids, text="", details=details)


def final(
    token_ids: Tokens, reason: FinishReason, details: tuple[StepDetails, ...] = ()
) -> RequestCompleted:
    return msgspec.structs.replace(
        completed("run", answer=token_ids), finish_reason=reason, details=details
    )


def seen(outputs: list[Any]) -> list[tuple[Tokens, str | None, object]]:
    return [
        (
            tuple(each.new_token_ids),
            None if each.finish_reason is None else str(each.finish_reason),
            each.stop_reason,
        )
        for each in outputs
    ]


def steps(**sampling: Any) -> Any:

    return AnswerSteps(request(**sampling))


def test_a_part_is_one_output_and_the_final_ends_the_answer() -> None:
    answer = steps()

    assert seen(answer.of(part(0, 7, 8))) == [((7, 8), None, None)]
    assert seen(answer.last(final((7, 8, 9), FinishReason.LENGTH))) == [((9,), "length", None)]


@pytest.mark.parametrize(("token", "reason"), [(STOP, STOP), (EOS, None)])
def test_a_stop_token_comes_with_the_finish_reason(token: int, reason: int | None) -> None:
    answer = steps()

    assert seen(answer.of(part(0, 7, token))) == []
    assert seen(answer.last(final((7, token), FinishReason.STOP))) == [((7, token), "stop", reason)]


def test_a_stop_token_that_does_not_end_the_answer_is_not_held_for_long() -> None:
    """With `min_tokens` in vLLM, this token would not be sampled; other engines may sample it."""
    answer = steps()
    answer.of(part(0, STOP))

    assert seen(answer.of(part(1, 7))) == [((STOP,), None, None), ((7,), None, None)]


def test_answers_with_stop_strings_have_an_output_for_each_token() -> None:
    answer = steps(stop=["x"])

    assert seen(answer.of(part(0, 7, 8))) == [((7,), None, None), ((8,), None, None)]


def test_an_answer_whose_tokens_are_known_ends_with_an_empty_output() -> None:
    answer = steps()
    answer.of(part(0, 7))

    assert seen(answer.last(final((7,), FinishReason.LENGTH))) == [((), "length", None)]


def test_a_repetition_has_vllms_stop_reason() -> None:
    outputs = steps().last(final((7, 7), FinishReason.REPETITION))

    assert seen(outputs) == [((7, 7), "repetition", "repetition_detected")]


def logprobs_of(*token_ids: int) -> StepDetails:

    ids = np.array([[token] for token in token_ids])
    lists = LogprobsLists(ids, np.zeros(ids.shape, np.float32), np.zeros(len(ids), int))
    output = EngineCoreOutput("", list(token_ids), new_logprobs=lists)
    return StepDetails(len(token_ids), encode_output(output))


def test_log_probabilities_arrive_with_their_tokens() -> None:
    answer = steps(logprobs=0)
    first, second, third = logprobs_of(7), logprobs_of(8), logprobs_of(9)
    outputs = answer.of(part(0, 7, 8, details=(first, second)))
    outputs += answer.of(part(3, 10))  # a part was lost
    outputs += answer.last(final((7, 8, 9), FinishReason.LENGTH, details=(first, second, third)))

    assert seen(outputs) == [((7,), None, None), ((8,), None, None), ((9,), "length", None)]
    assert [each.new_logprobs.logprob_token_ids.tolist() for each in outputs] == [
        [[7]],
        [[8]],
        [[9]],
    ]


def test_log_probabilities_are_refused_if_the_answer_has_token_ids_only():
    steps = AnswerSteps(request(logprobs=2))
    assert steps.of(part(0, 5, 6)) == []
    with pytest.raises(ContractError, match="token ids only") as caught:
        steps.last(final((5, 6), FinishReason.LENGTH))
    assert (caught.value.param, caught.value.status) == ("logprobs", 400)


def test_an_answer_that_a_stop_string_ended_keeps_its_last_tokens_text_beside_details() -> None:
    """VLLM leaves out the text of a token that comes with the reason, as that of a stop token."""
    answer = steps(logprobs=0, stop=["e"])
    details = (logprobs_of(7),)
    assert seen(answer.last(final((7,), FinishReason.STOP, details))) == [
        ((7,), None, None),
        ((), "stop", None),
    ]
