"""ConServe's baselines: offline work beside online work without a latency model."""

from dataclasses import dataclass

from ops.baselines.scheduling.co_serving import NonPreemptive, SarathiPreemptive
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
)

CHAT = Slo(ttft_s=1, tbt_s=0.1)
OFFLINE = Slo()


@dataclass(kw_only=True)
class Running:
    request_id: RequestId
    num_prefill_tokens: int
    num_computed_tokens: int
    num_output_tokens: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens


class Rig:
    """A baseline with a chunk of 1000 tokens, and its running requests."""

    def __init__(self, policy: NonPreemptive | SarathiPreemptive) -> None:
        self.policy = policy
        self.running: list[Running] = []

    def wait(self, name: str, slo: Slo, *, prompt: int = 500, arrived_at: float = 0.0) -> None:
        self.policy.add(
            RequestView(
                request_id=RequestId(name),
                arrived_at=arrived_at,
                prompt_tokens=prompt,
                max_tokens=10,
                slo=slo,
            )
        )

    def start(self, name: str, slo: Slo, *, prompt: int, computed: int) -> None:
        self.wait(name, slo, prompt=prompt)
        iteration = Iteration(compute_tokens=1, context_tokens=0, num_decodes=0, duration_s=0.1)
        self.policy.observe(0.0, IterationOutcome(iteration=iteration, admitted=(RequestId(name),)))
        self.running.append(
            Running(
                request_id=RequestId(name),
                num_prefill_tokens=prompt,
                num_computed_tokens=computed,
            )
        )

    def decide(self, *, free_kv_tokens: int = 10_000) -> IterationDecision:
        return self.policy.decide(
            0.0,
            BatchState(
                running=self.running,
                num_waiting=1,
                max_running=16,
                max_budget_tokens=4096,
                free_kv_tokens=free_kv_tokens,
            ),
        )


def test_non_preemptive_starts_online_requests_first() -> None:
    rig = Rig(NonPreemptive(1000))
    rig.wait("offline", OFFLINE)
    rig.wait("second", CHAT, arrived_at=2.0)
    rig.wait("first", CHAT, arrived_at=1.0)

    assert list(rig.decide().order) == ["first", "second", "offline"]


def test_non_preemptive_lets_running_offline_work_continue() -> None:
    rig = Rig(NonPreemptive(1000))
    rig.start("offline", OFFLINE, prompt=8000, computed=2000)
    rig.wait("chat", CHAT)
    decision = rig.decide(free_kv_tokens=16)

    assert not decision.held
    assert not decision.preempted
    assert decision.token_budget == 1000


def test_sarathi_pauses_offline_prefills_while_online_ones_need_the_chunk() -> None:
    rig = Rig(SarathiPreemptive(1000))
    rig.start("offline", OFFLINE, prompt=8000, computed=2000)
    rig.wait("chat", CHAT, prompt=1500)

    assert rig.decide().held == {"offline"}


def test_sarathi_fills_the_chunk_up_with_offline_work() -> None:
    """The online request gets 400 of 1000 tokens, the running offline request at most 600."""
    rig = Rig(SarathiPreemptive(1000))
    rig.start("offline", OFFLINE, prompt=8000, computed=2000)
    rig.wait("chat", CHAT, prompt=400)
    decision = rig.decide()

    assert not decision.held
    assert decision.per_request_cap == 600
    assert decision.token_budget == 1000


def test_sarathi_gives_the_whole_chunk_to_offline_work_when_it_is_alone() -> None:
    rig = Rig(SarathiPreemptive(1000))
    rig.start("offline", OFFLINE, prompt=8000, computed=2000)
    decision = rig.decide()

    assert decision.per_request_cap is None
    assert not decision.held


def test_sarathi_preempts_the_latest_offline_request_decodes_included() -> None:
    rig = Rig(SarathiPreemptive(1000))
    rig.start("early", OFFLINE, prompt=3000, computed=3001)
    rig.start("late", OFFLINE, prompt=3000, computed=3001)
    rig.wait("chat", CHAT, prompt=1500)
    decision = rig.decide(free_kv_tokens=100)

    assert decision.preempted == {"late"}
    assert next(iter(decision.order)) == "chat"


def test_sarathi_preempts_no_request_for_offline_work() -> None:
    rig = Rig(SarathiPreemptive(1000))
    rig.start("early", OFFLINE, prompt=3000, computed=3001)
    rig.wait("late", OFFLINE, prompt=1500)

    assert not rig.decide(free_kv_tokens=100).preempted


def test_a_removed_request_is_forgotten() -> None:
    rig = Rig(SarathiPreemptive(1000))
    rig.wait("chat", CHAT, prompt=1500)
    rig.policy.remove(RequestId("chat"))
    rig.start("offline", OFFLINE, prompt=8000, computed=2000)

    assert not rig.decide().held
