"""The simulated engine core follows the decisions of its policy."""

from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.core import SimulatedEngineCore
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs
from solver.scheduling.engine.decision import BatchState, IterationDecision, RequestView
from tests.unit.agent.backends.simulated_cores import ENTRY, alone, drain, request


def test_earliest_deadline_is_admitted_first() -> None:
    settings = SimulatedSettings(max_running=1)
    core = SimulatedEngineCore(ENTRY, settings, FixedChunkEdf(512))
    for name, slo in (("none", Slo()), ("late", Slo(ttlt_s=60)), ("soon", Slo(ttft_s=1))):
        core.add(request(name, slo=slo))
    answers, _ = drain(core)

    assert list(answers) == ["soon", "late", "none"]


class Holding(FixedChunkFcfs):
    """Holds every running prefill, or preempts every running request."""

    def __init__(self, *, preempt: bool) -> None:
        super().__init__(32)
        self.preempt = preempt
        self.active = False

    def decide(self, now: float, batch: BatchState) -> IterationDecision:
        running = frozenset(run.request_id for run in batch.running)
        decision = super().decide(now, batch)
        return IterationDecision(
            order=decision.order,
            token_budget=decision.token_budget,
            held=running if self.active and not self.preempt else frozenset(),
            preempted=running if self.active and self.preempt else frozenset(),
        )


def test_held_prefill_keeps_its_memory_and_its_position() -> None:
    policy = Holding(preempt=False)
    core = SimulatedEngineCore(ENTRY, SimulatedSettings(), policy)
    core.add(request("a", length=64, max_tokens=4))
    core.iterate(0.0)
    held_utilization = core.kv_utilization
    policy.active = True
    idle = core.iterate(0.0)

    assert (idle.iteration, idle.duration_s, idle.outputs) == (None, 0.0, ())
    assert core.kv_utilization == held_utilization > 0
    policy.active = False
    assert drain(core)[0] == {"a": alone(request("a", length=64, max_tokens=4))}


def test_preempted_request_restarts_and_gives_the_same_answer() -> None:
    policy = Holding(preempt=True)
    core = SimulatedEngineCore(ENTRY, SimulatedSettings(), policy)
    core.add(request("a", length=32, max_tokens=8))
    answer = [each.token_ids[0] for _ in range(3) for each in core.iterate(0.0).outputs]
    policy.active = True
    core.iterate(0.0)

    assert (core.num_running, core.num_waiting) == (0, 1)
    policy.active = False
    assert answer + drain(core)[0]["a"] == alone(request("a", length=32, max_tokens=8))


class Recording(FixedChunkFcfs):
    """Records the progress of added requests and the answers of removed ones."""

    def __init__(self) -> None:
        super().__init__(512)
        self.progress: dict[str, int] = {}
        self.answers: dict[str, int | None] = {}

    def add(self, request: RequestView) -> None:
        self.progress[request.request_id] = request.progress_tokens
        super().add(request)

    def remove(self, request_id: RequestId, answer_tokens: int | None = None) -> None:
        self.answers[request_id] = answer_tokens
        super().remove(request_id, answer_tokens)


def test_the_policy_gets_the_lengths_of_whole_answers() -> None:
    policy = Recording()
    core = SimulatedEngineCore(ENTRY, SimulatedSettings(), policy)
    core.add(request("whole", max_tokens=4))
    core.add(request("resumed", max_tokens=10, progress=(11, 12, 13)))
    core.add(request("aborted", max_tokens=50))
    core.iterate(0.0)
    core.abort(RequestId("aborted"))
    drain(core)

    assert policy.progress == {"whole": 0, "resumed": 3, "aborted": 0}
    assert policy.answers == {"whole": 4, "resumed": 10, "aborted": None}
