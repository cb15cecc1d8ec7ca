"""Operations of packages: orders by name, their arguments, and what they do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest

from shared.contracts.control import LsoOutcome, LsoRun
from shared.contracts.requests import QueuedRequest
from solver.instance.operations import Steps, perform
from solver.instance.state import InstanceState
from solver.planning.added_operations import AddedOperation
from solver.planning.lso.operations import Evict, Lso
from solver.planning.lso.results import LsoResult, already
from tests.queued import a_request
from tests.unit.instance.driver import OURS, Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictSome(Lso):
    kind: ClassVar[str] = "evict_some"
    most: int


def steps(instance: InstanceState, lso: EvictSome) -> Steps:
    names = tuple(held.request_id for held in instance.requests.runs)[: lso.most]
    if not names:
        return already("nothing runs")
    result = yield from perform(instance, Evict(request_ids=names))
    return LsoResult(message=f"as asked, {result.message}")


ADDED = AddedOperation(lso=EvictSome, steps=steps)


def driver_with(*requests: QueuedRequest) -> Driver:
    return Driver(*requests, operations={"evict-some": ADDED})


def order(driver: Driver, operation: str, **arguments: str) -> LsoResult:
    return driver.order(LsoRun(instance_id=OURS, operation=operation, arguments=arguments))


def test_operation_is_executed_and_recorded_with_the_operations_inside() -> None:
    driver = driver_with(a_request("a"), a_request("b"))
    result = order(driver, "evict-some", most="1")

    assert result.outcome is LsoOutcome.DONE
    assert result.message.startswith("as asked, 1 requeued")
    assert [len(driver.records(kind)) for kind in (EvictSome, Evict)] == [1, 1]


def test_operation_may_have_nothing_to_do() -> None:
    assert order(driver_with(), "evict-some", most="1").outcome is LsoOutcome.ALREADY


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("other", {}, r"adds an operation 'other'; it has evict-some\."),
        ("evict-some", {"least": "1"}, "no argument 'least'; its arguments are most"),
        ("evict-some", {"most": "x"}, r"evict_some: Expected `int`, got `str` - at `\$.most`"),
        ("evict-some", {}, "evict_some: .*missing required field `most`"),
        ("evict-some", {"most": "1", "reason": "x"}, "no argument 'reason'"),
    ],
)
def test_order_that_does_not_fit_is_refused_by_name(
    name: str, arguments: Mapping[str, str], message: str
) -> None:
    driver = driver_with(a_request("a"))
    result = order(driver, name, **arguments)

    assert result.outcome is LsoOutcome.REFUSED
    assert driver.records(EvictSome) == []
    assert re.search(message, result.message)


def test_agent_without_packages_says_so() -> None:
    assert "it has none" in order(Driver(), "evict-some").message


def test_operation_must_be_a_kind_of_operation() -> None:
    with pytest.raises(TypeError, match="lso must be a subclass of Lso"):
        AddedOperation(lso=int, steps=steps)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="steps must be a function"):
        AddedOperation(lso=EvictSome, steps=None)  # type: ignore[arg-type]
