"""The operations that are chosen for a situation, and which they are in brief."""

from typing import Any

from shared.contracts.plans import Segment
from solver.planning.lso_actions import lso_actions
from solver.planning.lso_situation import HeadChange
from solver.planning.lsos import Lso
from tests.unit.solver.planning.situations import situation


def actions(queue: tuple[Segment, ...], **fields: Any) -> tuple[Lso, ...]:
    return lso_actions(HeadChange(old_head=None, queue=queue), situation(**fields))


def brief(lsos: tuple[Lso, ...]) -> list[tuple[Any, ...]]:
    """Kind and object of each."""
    found: list[tuple[Any, ...]] = []
    for lso in lsos:
        what = [
            getattr(lso, name)
            for name in ("request_id", "request_ids", "model")
            if hasattr(lso, name)
        ]
        found.append((lso.kind, *what))
    return found
