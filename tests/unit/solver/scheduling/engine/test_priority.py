"""Priority keys."""

import pytest

from shared.contracts.qos import QosClass
from solver.scheduling.engine.priority import KEYS, Ordering, remaining_work_tokens


def key(ordering: Ordering, *, arrived: float = 0, deadline: float = 0, work: float = 0) -> float:
    return KEYS[ordering](arrived, deadline, work, 0.008, 0.0)


def test_hybrid_priority_is_deadline_plus_weighted_work() -> None:
    # QoServe eq. 4 with alpha = 8 ms/token: arrival 10, TTFT 6, 1000 tokens.
    assert key(Ordering.HYBRID, deadline=16, work=1000) == pytest.approx(24)


def test_work_is_the_prefill_plus_the_answer_unless_interactive() -> None:
    assert remaining_work_tokens(QosClass.INTERACTIVE, prefill_tokens=7, decode_tokens=5) == 7
    assert remaining_work_tokens(QosClass.NON_INTERACTIVE, prefill_tokens=7, decode_tokens=5) == 12


@pytest.mark.parametrize(
    ("ordering", "first"),
    [
        (Ordering.FCFS, "oldest"),
        (Ordering.EDF, "urgent"),
        (Ordering.SRPF, "short"),
        (Ordering.HYBRID, "urgent"),
        (Ordering.QUARTZ, "short"),
    ],
)
def test_each_ordering_has_its_own_first_request(ordering: Ordering, first: str) -> None:
    keys = {
        "oldest": key(ordering, arrived=0, deadline=600, work=5000),
        "urgent": key(ordering, arrived=5, deadline=11, work=3000),
        "short": key(ordering, arrived=9, deadline=1809, work=10),
    }

    assert min(keys, key=lambda name: keys[name]) == first
