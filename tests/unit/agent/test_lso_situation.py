"""Inputs for the choice of operations: sizes, room and predictions."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.agent.aborting import end_run
from services.agent.backends.totals import CheckpointTotals
from services.agent.backends.weights import weight_bytes
from services.agent.lso.sizes import kv_bytes_per_token
from services.agent.state import Ending
from shared.contracts.estimates import LatencyCoefficients, OutputTokens, Profile
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import FinishReason
from solver.planning.lso.facts import facts_of
from tests.brokers import eventually
from tests.queued import BEST_EFFORT, MODEL, a_request, sampling
from tests.unit.agent.rig import AgentRig
from tests.unit.agent.tasks import admitting

pytestmark = pytest.mark.virtual_time


def entry(path: Path, **fields: int) -> ModelEntry:
    return ModelEntry(name=MODEL, path=str(path), architecture="x", max_model_len=64, **fields)


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (
            {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "hidden_size": 4096, "torch_dtype": "bfloat16"},
            131_072,
        ),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "head_dim": 32,
             "dtype": "float32"},
            2 * 2 * 4 * 32 * 4,
        ),
        ({}, 0),
    ],
    ids=["Llama 3 8B", "without grouped queries", "says nothing"],
)  # fmt: skip
def test_kv_bytes_per_token_follow_from_the_models_shape(
    tmp_path: Path, config: dict[str, object], num_bytes: int
):
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert kv_bytes_per_token(entry(tmp_path)) == num_bytes


def test_model_without_files_has_unknown_sizes(tmp_path: Path):
    assert kv_bytes_per_token(entry(tmp_path / "nowhere")) == 0
    assert weight_bytes(entry(tmp_path / "nowhere")) == 0


def test_weight_sizes_come_from_the_registry_or_the_files(tmp_path: Path):
    for number in range(2):
        (tmp_path / f"part-{number}.safetensors").write_bytes(b"x" * 100)

    assert weight_bytes(entry(tmp_path)) == 200
    assert weight_bytes(entry(tmp_path, weight_bytes=7)) == 7


async def test_requests_that_are_ending_do_not_count_as_running(rig: AgentRig):
    """If requests that leave did not count as gone, their room would be freed twice."""
    async with admitting(rig):
        await rig.hold(a_request("stays"))
        await rig.hold(a_request("goes", slo=BEST_EFFORT))
        await rig.engine.began("goes")
        before = rig.observer.situation()
        goes = rig.state.runs[before.running[-1].request_id]
        end_run(rig.state, rig.engine, goes, Ending.EVICTED)
        after = rig.observer.situation()

    assert [work.request_id for work in before.running] == ["stays", "goes"]
    assert [work.request_id for work in after.running] == ["stays"]
    assert after.free_tokens == before.free_tokens + 28
    assert after.free_slots == before.free_slots + 1


@pytest.mark.parametrize(
    ("fields", "slack_s"),
    [
        ({"slo": Slo(ttft_s=5.0, tbt_s=1.0)}, 10.0),
        ({"slo": Slo(ttft_s=5.0)}, math.inf),
        ({"slo": Slo(ttlt_s=30.0)}, 30.0 - 0.01 * 20),
        ({"slo": Slo(ttft_s=5.0, ttlt_s=8.0)}, 8.0 - 0.01 * 20),
        ({"slo": BEST_EFFORT}, math.inf),
        ({"slo": Slo(ttlt_s=30.0), "relegated": True}, math.inf),
    ],
    ids=["token", "no pace", "end", "end of a chat", "best effort", "relegated"],
)
async def test_slack_ends_at_the_next_token_or_the_completion_deadline(
    rig: AgentRig, fields: dict[str, Any], slack_s: float
):
    """Five of 25 tokens are generated; each further token takes 10 ms."""
    rig.state.profiles[MODEL] = Profile(
        model=MODEL,
        engine="scripted",
        device="paper",
        version=1,
        at=0.0,
        latency=LatencyCoefficients(constant_s=0.01, linear_s=0.0),
    )
    run, task = await rig.running(a_request("r", sampling=sampling(25), **fields))
    rig.engine.emit("r", *range(5))
    await eventually(lambda: len(run.answer.token_ids) == 5)

    (work,) = rig.observer.situation().running

    assert work.remaining_s == pytest.approx(0.2)
    assert work.slack_s == pytest.approx(slack_s)
    rig.engine.emit("r", 6, finish=FinishReason.LENGTH)
    await task


@pytest.mark.parametrize(
    ("num_tokens", "left"),
    [(1, 99), (40, 60), (90, 10), (99, 10), (500, 10), (2040, 8)],
    ids=["begun", "under way", "nearly done", "about to end", "longer than expected", "limit"],
)
async def test_remaining_time_follows_from_the_expected_answer(
    rig: AgentRig, num_tokens: int, left: int
):
    """The expected answer has 100 tokens, the limit is 2048; each token takes 10 ms."""
    rig.state.profiles[MODEL] = Profile(
        model=MODEL,
        engine="scripted",
        device="paper",
        version=1,
        at=0.0,
        latency=LatencyCoefficients(constant_s=0.01, linear_s=0.0),
        output_tokens={"*": OutputTokens(mean=100.0, sd=10.0, count=9)},
    )
    request = a_request("r", sampling=sampling(2048, ignore_eos=False))
    run, task = await rig.running(request)
    rig.engine.emit("r", *[7] * num_tokens)
    await eventually(lambda: len(run.answer.token_ids) == num_tokens)

    (work,) = rig.observer.situation().running

    assert work.remaining_s == pytest.approx(0.01 * left)
    rig.engine.emit("r", 6, finish=FinishReason.STOP)
    await task


async def test_remaining_time_is_unknown_without_a_profile(rig: AgentRig):
    _, task = await rig.running(a_request("r"))

    (work,) = rig.observer.situation().running

    assert (work.remaining_s, work.slack_s) == (None, math.inf)
    rig.engine.emit("r", 6, finish=FinishReason.LENGTH)
    await task


async def test_transfer_rate_is_the_prior_until_measured(rig: AgentRig):
    snapshot = rig.engine.snapshot()
    measured = replace(
        snapshot, checkpoints=CheckpointTotals(restored_bytes=3_000_000, restore_s=0.5)
    )

    assert rig.observer.costs(snapshot).transfer_bytes_per_s == float(4 << 30)
    assert rig.observer.costs(measured).transfer_bytes_per_s == 6_000_000


async def test_status_has_the_inputs_for_the_choice_of_operations(rig: AgentRig):
    async with admitting(rig):
        await rig.hold(a_request("stays"))
        await rig.hold(a_request("dump", slo=BEST_EFFORT))
        await rig.engine.began("dump")
        reported = rig.reporter.status().lso
        situation = rig.observer.situation()

    assert reported is not None
    assert reported == facts_of(situation)
    assert sorted((each.requests, each.gives_way) for each in reported.running) == [
        (1, False),
        (1, True),
    ]
    assert reported.transfer_bytes_per_s == float(4 << 30)
