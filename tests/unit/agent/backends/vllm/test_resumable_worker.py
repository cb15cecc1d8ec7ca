"""Sampling in a vLLM worker for requests that may resume elsewhere, without vLLM."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from services.agent.backends.vllm.shared.qos import QOS_KEY, RequestQos
from services.agent.backends.vllm.shared.seeds import seed_at
from services.agent.backends.vllm.shared.workers import (
    CPU_WORKER,
    SAFEPOINT_WORKERS,
    draws_by_position,
)
from services.agent.backends.vllm.worker.resumable import Resumable


class Generator:
    """A fake random generator that records its seed."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


@dataclass
class Metadata:
    no_penalties: bool
    output_token_ids: list[list[int]] = field(default_factory=list)
    bad_words_token_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    thinking_budget_state_holder: Any = None


@dataclass
class Seen:
    """State of a worker at the time when vLLM samples."""

    generators: dict[int, Any]
    outputs: list[list[int]]
    holder: Any


class VllmWorker:
    """Fake of vLLM's worker that records its state while it samples."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner
        self.seen: list[Seen] = []

    def sample_tokens(self, grammar: object) -> object:
        batch = self.model_runner.input_batch
        metadata = batch.sampling_metadata
        self.seen.append(
            Seen(
                dict(batch.generators),
                metadata.output_token_ids,
                metadata.thinking_budget_state_holder,
            )
        )
        return grammar


class Holder:
    """A fake holder of thinking budgets."""

    outputs: list[list[int]]

    def update_state(self, output_token_ids: list[list[int]], *_: Any, **__: Any) -> None:
        self.outputs = output_token_ids

    def has_tracked_requests(self) -> bool:
        return True


class Worker(Resumable, VllmWorker):
    pass


def row(
    name: str, prompt: list[int], *, progress: int = 0, output: tuple[int, ...] = (), seed: int = 5
) -> Any:
    qos = msgspec.to_builtins(RequestQos(progress_tokens=progress))
    return SimpleNamespace(
        name=name,
        prompt_token_ids=prompt,
        output=list(output),
        sampling_params=SimpleNamespace(seed=seed, extra_args={QOS_KEY: qos}),
    )


class Batch(SimpleNamespace):
    """A batch in which the last token of a row may be in flight; the token is then -1."""

    in_flight: dict[str, int]
    """Name of a row -> the token that replaces its placeholder."""

    def update_async_output_token_ids(self) -> None:
        for name, output in zip(self.req_ids, self.sampling_metadata.output_token_ids, strict=True):
            if name in self.in_flight:
                output[-1] = self.in_flight[name]


def worker_of(
    *rows: Any,
    random: tuple[int, ...] = (),
    unfinished: tuple[int, ...] = (),
    penalties: bool,
    bad_words: bool = False,
) -> Worker:
    """A worker with a generator for each row in *random*; *unfinished* rows still prefill."""
    mask = np.zeros(16, dtype=bool)
    mask[list(unfinished)] = True
    batch = Batch(
        in_flight={},
        num_reqs=len(rows),
        req_ids=[each.name for each in rows],
        generators={index: Generator() for index in random},
        num_tokens_no_spec=np.array([len(r.prompt_token_ids) + len(r.output) for r in rows]),
        sampling_metadata=Metadata(
            no_penalties=not penalties,
            output_token_ids=[each.output for each in rows] if penalties or bad_words else [],
            bad_words_token_ids={0: [[7]]} if bad_words else {},
        ),
    )
    runner = SimpleNamespace(
        input_batch=batch,
        requests={each.name: each for each in rows},
        execute_model_state=("computed",),
        discard_request_mask=SimpleNamespace(np=mask),
    )
    return Worker(runner)


class TestDraws:
    def test_each_draw_is_seeded_by_its_position(self) -> None:
        worker = worker_of(
            row("a", [1] * 10, seed=5),
            row("b", [1] * 8, output=(7, 7)),
            random=(0, 1),
            penalties=False,
        )
        worker.sample_tokens(None)
        seeds = [each.seeds for each in worker.model_runner.input_batch.generators.values()]

        assert seeds == [[seed_at(5, 10)], [seed_at(5, 10)]]

    def test_positions_and_seeds_have_separate_streams(self) -> None:
        drawn = {seed_at(seed, place) for seed in (-3, 0, 1, 2**63 - 1) for place in range(50)}

        assert len(drawn) == 200
        assert all(seed < 2**63 for seed in drawn)

    def test_rows_without_a_token_have_no_generator(self) -> None:
        """vLLM would rewind the generator of a row without a token; CPU generators cannot."""
        worker = worker_of(
            row("a", [1] * 10), row("b", [1] * 8), random=(0, 1), unfinished=(0,), penalties=False
        )
        generators = worker.model_runner.input_batch.generators
        before = dict(generators)
        worker.sample_tokens(None)

        assert list(worker.seen[0].generators) == [1]
        assert generators == before
        assert before[0].seeds == []

    def test_greedy_rows_are_unchanged(self) -> None:
        worker = worker_of(row("a", [1] * 10), unfinished=(0,), penalties=False)

        assert worker.sample_tokens("grammar") == "grammar"
        assert worker.seen[0].generators == {}


class TestPenalties:
    def test_progress_counts_as_output(self) -> None:
        worker = worker_of(
            row("resumed", [1, 2, 3, 8, 9], progress=2, output=(4,)),
            row("fresh", [1, 2, 3], output=(6,)),
            penalties=True,
        )
        batch = worker.model_runner.input_batch
        before = batch.sampling_metadata
        worker.sample_tokens(None)

        assert worker.seen[0].outputs == [[8, 9, 4], [6]]
        assert batch.sampling_metadata is before
        assert before.output_token_ids == [[4], [6]]

    def test_bad_words_may_begin_in_the_progress(self) -> None:
        worker = worker_of(
            row("resumed", [1, 2, 3, 8, 9], progress=2, output=(4,)),
            penalties=False,
            bad_words=True,
        )
        worker.sample_tokens(None)

        assert worker.seen[0].outputs == [[8, 9, 4]]

    def test_thinking_budgets_count_the_progress_as_a_part_of_the_prompt(self) -> None:
        worker = worker_of(row("resumed", [1, 8, 9], progress=2, output=(4,)), penalties=True)
        metadata = worker.model_runner.input_batch.sampling_metadata
        metadata.thinking_budget_state_holder = holder = Holder()
        worker.sample_tokens(None)
        seen = worker.seen[0].holder
        seen.update_state(worker.seen[0].outputs, [], repeat_indices=None)

        assert holder.outputs == [[4]]
        assert seen.has_tracked_requests()

    def test_tokens_in_flight_are_known_before_they_are_copied(self) -> None:
        worker = worker_of(
            row("resumed", [1, 2, 8, 9], progress=2, output=(4, -1)),
            row("fresh", [1, 2], output=(-1,)),
            penalties=True,
        )
        worker.model_runner.input_batch.in_flight = {"resumed": 5, "fresh": 6}
        worker.sample_tokens(None)

        assert worker.seen[0].outputs == [[8, 9, 4, 5], [6]]

    def test_without_penalties_no_progress_is_gathered(self) -> None:
        worker = worker_of(row("resumed", [1, 2], progress=1, output=(4,)), penalties=False)
        worker.sample_tokens(None)

        assert worker.seen[0].outputs == []


def test_iteration_without_work_changes_nothing() -> None:
    worker = worker_of(row("a", [1] * 10), random=(0,), penalties=False)
    worker.model_runner.execute_model_state = None
    worker.sample_tokens(None)

    assert worker.model_runner.input_batch.generators[0].seeds == []


@pytest.mark.parametrize(
    ("worker", "is_v2", "expected"),
    [
        (CPU_WORKER, False, True),
        (SAFEPOINT_WORKERS[True], False, True),
        (SAFEPOINT_WORKERS[False], False, True),
        ("vllm.v1.worker.gpu_worker.Worker", True, True),
        ("vllm.v1.worker.gpu_worker.Worker", False, False),
    ],
)
def test_position_based_drawing_is_detected(worker: str, expected: bool, *, is_v2: bool) -> None:  # noqa: FBT001 - a case
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker), use_v2_model_runner=is_v2
    )

    assert draws_by_position(config) is expected
