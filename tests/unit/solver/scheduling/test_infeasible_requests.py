"""Eager relegation, by worked examples. Requests arrive at `NOW`."""

import pytest

from shared.contracts.qos import Slo
from shared.contracts.requests import Progress
from solver.scheduling.relegation import is_infeasible
from tests.clocks import NOW
from tests.queued import a_request


@pytest.mark.parametrize(
    ("waited_s", "infeasible"),
    [(0.0, False), (3.9, False), (4.0, False), (4.1, True), (100.0, True)],
)
def test_an_interactive_request_is_infeasible_once_its_first_token_is_late(
    waited_s: float, *, infeasible: bool
):
    """The prefill takes 1 s of a TTFT target of 5 s; the decode does not matter."""
    request = a_request(slo=Slo(ttft_s=5.0, tbt_s=0.1))
    now = NOW + waited_s
    assert is_infeasible(request, now=now, prefill_s=1.0, decode_s=1000.0) is infeasible


@pytest.mark.parametrize(("waited_s", "infeasible"), [(6.9, False), (7.0, False), (7.1, True)])
def test_another_request_is_infeasible_once_its_last_token_is_late(
    waited_s: float, *, infeasible: bool
):
    """Prefill (1 s) and decode (2 s) take 3 s of a TTLT target of 10 s."""
    request = a_request(slo=Slo(ttlt_s=10.0))
    now = NOW + waited_s
    assert is_infeasible(request, now=now, prefill_s=1.0, decode_s=2.0) is infeasible


def test_an_absolute_deadline_counts_when_it_is_sooner():
    request = a_request(slo=Slo(ttlt_s=100.0, deadline_at=NOW + 2))
    assert is_infeasible(request, now=NOW, prefill_s=1.0, decode_s=2.0)
    assert not is_infeasible(request, now=NOW, prefill_s=1.0, decode_s=0.5)


def test_best_effort_is_never_infeasible():
    assert not is_infeasible(a_request(slo=Slo()), now=NOW + 1e9, prefill_s=1e9, decode_s=1e9)


def test_a_relegated_request_is_not_relegated_again():
    request = a_request(relegated=True)
    assert not is_infeasible(request, now=NOW + 100, prefill_s=1.0, decode_s=0.0)


def test_a_first_token_that_was_delivered_cannot_become_late():
    progress = Progress(token_ids=(1,), first_token_at=NOW + 1)
    request = a_request(slo=Slo(ttft_s=5.0), progress=progress)
    assert not is_infeasible(request, now=NOW + 100, prefill_s=1.0, decode_s=0.0)
