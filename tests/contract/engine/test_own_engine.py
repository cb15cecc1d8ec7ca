"""The engine contract for the engine of a guide, which has few capabilities."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.agent.backends.base import EngineBackend, SchedulingParameters
from shared.contracts.errors import EngineError, UnsupportedError
from shared.runtime.clock import SystemClock
from tests.contract.engine.engines import (
    CRASH_TOKEN,
    LLAMA,
    EngineRig,
    greedy,
    prompt_of,
    tiny_entries,
)
from tests.contract.engine.test_engine_backend import (
    test_a_bad_request_fails_and_the_engine_survives,
    test_a_closed_engine_can_be_closed_again_and_restarted,
    test_a_model_answers_as_before_after_reactivation,
    test_a_removed_model_leaves_memory_also_if_it_is_active,
    test_a_run_without_a_reader_is_aborted,
    test_a_seed_makes_random_answers_repeatable,
    test_a_stop_token_ends_the_answer_and_is_part_of_it,
    test_aborting_an_unknown_request_does_nothing,
    test_activating_the_active_model_takes_no_time,
    test_an_aborted_run_ends_without_a_reason_and_frees_its_memory,
    test_an_added_model_can_be_activated,
    test_an_answer_may_end_with_eos,
    test_an_answer_resumed_with_progress_equals_the_undisturbed_answer,
    test_an_unknown_model_is_refused,
    test_concurrent_answers_equal_those_of_single_requests,
    test_different_prompts_get_different_answers,
    test_greedy_answers_are_deterministic,
    test_min_tokens_count_from_the_start_of_the_answer,
    test_no_other_model_is_activated_while_requests_run,
    test_requests_fail_when_the_engine_dies_and_it_restarts,
    test_resuming_a_complete_answer_only_sends_its_final,
    test_the_context_limit_ends_the_answer,
    test_the_prefill_is_timed_from_its_first_chunk_to_the_first_token,
    test_the_snapshot_counts_requests_and_memory,
)
from tests.e2e.guides.guide_blocks import module_of

__all__ = [
    "test_a_bad_request_fails_and_the_engine_survives",
    "test_a_closed_engine_can_be_closed_again_and_restarted",
    "test_a_model_answers_as_before_after_reactivation",
    "test_a_removed_model_leaves_memory_also_if_it_is_active",
    "test_a_run_without_a_reader_is_aborted",
    "test_a_seed_makes_random_answers_repeatable",
    "test_a_stop_token_ends_the_answer_and_is_part_of_it",
    "test_aborting_an_unknown_request_does_nothing",
    "test_activating_the_active_model_takes_no_time",
    "test_an_aborted_run_ends_without_a_reason_and_frees_its_memory",
    "test_an_added_model_can_be_activated",
    "test_an_answer_may_end_with_eos",
    "test_an_answer_resumed_with_progress_equals_the_undisturbed_answer",
    "test_an_unknown_model_is_refused",
    "test_concurrent_answers_equal_those_of_single_requests",
    "test_different_prompts_get_different_answers",
    "test_greedy_answers_are_deterministic",
    "test_min_tokens_count_from_the_start_of_the_answer",
    "test_no_other_model_is_activated_while_requests_run",
    "test_requests_fail_when_the_engine_dies_and_it_restarts",
    "test_resuming_a_complete_answer_only_sends_its_final",
    "test_the_context_limit_ends_the_answer",
    "test_the_prefill_is_timed_from_its_first_chunk_to_the_first_token",
    "test_the_snapshot_counts_requests_and_memory",
]
"""Tests of the contract that run here with this module's fixture `rig`."""

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKEN_S = 0.001


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    """The engine of the guide; to kill it, its model fails at a prompt with `CRASH_TOKEN`."""
    guide = module_of("own-engine", "own_engine")
    entries = tiny_entries(tmp_path_factory.mktemp("models"), weights=False)
    engine: EngineBackend = guide.OwnEngine(entries, {"token_s": str(TOKEN_S)}, SystemClock())
    next_token = guide.next_token

    def failing(entry: object, tokens: tuple[int, ...], *drawn: int) -> int:
        if tokens[0] == CRASH_TOKEN:
            raise OSError("the device is lost")
        return int(next_token(entry, tokens, *drawn))

    async def kill() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guide, "next_token", failing)
            with pytest.raises(EngineError, match="the device is lost"):
                await EngineRig(engine, kill).ask((CRASH_TOKEN,), greedy())

    yield EngineRig(engine, kill, entries)
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: EngineRig) -> EngineRig:
    await shared_rig.bring_up()
    return shared_rig


async def test_operations_that_the_engine_lacks_are_refused(rig: EngineRig) -> None:
    engine = rig.engine
    for refused in (
        engine.warm(LLAMA),
        engine.cool(LLAMA),
        engine.set_scheduling(SchedulingParameters(token_budget=64, max_running=4)),
        engine.preempt_now(),
    ):
        with pytest.raises(UnsupportedError):
            await refused

    assert len((await rig.ask(prompt_of(5), greedy(3))).token_ids) == 3
