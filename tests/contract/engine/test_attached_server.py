"""The engine contract for a stock `vllm serve`, as far as a server of others can keep it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ops.bench.vllm_serve import stock_server
from services.agent.backends.base import SchedulingParameters
from services.agent.backends.remote.backend import RemoteEngine
from services.agent.backends.settings import RemoteSettings
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.errors import UnsupportedError
from shared.contracts.requests import Sampling
from shared.contracts.telemetry import Capability
from tests.contract.engine.engines import LLAMA, EngineRig, greedy, prompt_of, tiny_entries
from tests.contract.engine.test_engine_backend import (
    test_a_bad_request_fails_and_the_engine_survives,
    test_a_repeated_prompt_is_partly_cached,
    test_a_run_without_a_reader_is_aborted,
    test_a_seed_makes_random_answers_repeatable,
    test_a_stop_token_ends_the_answer_and_is_part_of_it,
    test_aborting_an_unknown_request_does_nothing,
    test_activating_the_active_model_takes_no_time,
    test_an_aborted_run_ends_without_a_reason_and_frees_its_memory,
    test_an_answer_may_end_with_eos,
    test_an_answer_resumed_with_progress_equals_the_undisturbed_answer,
    test_an_unknown_model_is_refused,
    test_concurrent_answers_equal_those_of_single_requests,
    test_different_prompts_get_different_answers,
    test_greedy_answers_are_deterministic,
    test_min_tokens_count_from_the_start_of_the_answer,
    test_resuming_a_complete_answer_only_sends_its_final,
    test_the_context_limit_ends_the_answer,
    test_the_snapshot_counts_requests_and_memory,
)
from tests.requirements import absent

__all__ = [
    "test_a_bad_request_fails_and_the_engine_survives",
    "test_a_repeated_prompt_is_partly_cached",
    "test_a_run_without_a_reader_is_aborted",
    "test_a_seed_makes_random_answers_repeatable",
    "test_a_stop_token_ends_the_answer_and_is_part_of_it",
    "test_aborting_an_unknown_request_does_nothing",
    "test_activating_the_active_model_takes_no_time",
    "test_an_aborted_run_ends_without_a_reason_and_frees_its_memory",
    "test_an_answer_may_end_with_eos",
    "test_an_answer_resumed_with_progress_equals_the_undisturbed_answer",
    "test_an_unknown_model_is_refused",
    "test_concurrent_answers_equal_those_of_single_requests",
    "test_different_prompts_get_different_answers",
    "test_greedy_answers_are_deterministic",
    "test_min_tokens_count_from_the_start_of_the_answer",
    "test_resuming_a_complete_answer_only_sends_its_final",
    "test_the_context_limit_ends_the_answer",
    "test_the_snapshot_counts_requests_and_memory",
]
"""Tests of the contract that run here with this module's fixture `rig`."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]
FLAGS = (
    *("--served-model-name", LLAMA, "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", "4096", "--block-size", "32", "--enable-prompt-tokens-details"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    if (reason := vllm_unavailable_reason()) is not None:
        absent(reason, "vllm")
    directory: Path = tmp_path_factory.mktemp("attached")
    (entry,) = (each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    arguments = ("--model", entry.path, *FLAGS)
    async with stock_server(arguments, directory / "serve.log") as server:
        engine = RemoteEngine([entry], RemoteSettings(url=server.url))

        async def kill() -> None:
            pytest.fail("the end-to-end test kills servers")

        yield EngineRig(engine, kill, (entry,))
        await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: EngineRig) -> EngineRig:
    await shared_rig.bring_up()
    return shared_rig


@pytest.mark.parametrize("cut", [1, 9])
async def test_random_answer_with_penalties_resumes_with_equal_tokens(
    rig: EngineRig, cut: int
) -> None:
    sampling = Sampling(
        max_tokens=20, temperature=0.8, seed=7, frequency_penalty=0.7, ignore_eos=True
    )
    whole = (await rig.ask(prompt_of(70, first=5), sampling)).token_ids
    rest = await rig.ask(prompt_of(70, first=5), sampling, progress=whole[:cut])

    assert whole == whole[:cut] + rest.token_ids


async def test_server_of_others_keeps_its_model_limits_and_caches(rig: EngineRig) -> None:
    engine = rig.engine
    missing = {Capability.MODEL_SWAP, Capability.SCHEDULING, Capability.CHECKPOINT}

    assert not engine.identity.capabilities & missing
    for refused in (
        engine.warm(LLAMA),
        engine.cool(LLAMA),
        engine.set_scheduling(SchedulingParameters(token_budget=64, max_running=4)),
        engine.clear_caches(),
        engine.preempt_now(),
    ):
        with pytest.raises(UnsupportedError):
            await refused
    assert len((await rig.ask(prompt_of(5), greedy(3))).token_ids) == 3
