"""The operations chosen for a situation, and their short form for comparisons."""

from typing import Any

from shared.contracts.plans import Segment
from solver.planning.lso.actions import lso_actions
from solver.planning.lso.operations import Lso
from solver.planning.lso.situation import HeadChange
from tests.unit.solver.planning.situations import situation


def actions(queue: tuple[Segment, ...], **fields: Any) -> tuple[Lso, ...]:
    return lso_actions(HeadChange(old_head=None, queue=queue), situation(**fields))


def brief(lsos: tuple[Lso, ...]) -> list[tuple[Any, ...]]:
    """Kind and object of each operation."""
    found: list[tuple[Any, ...]] = []
    for lso in lsos:
        what = [
            getattr(lso, name)
            for name in ("request_id", "request_ids", "model")
            if hasattr(lso, name)
        ]
        found.append((lso.kind, *what))
    return found
