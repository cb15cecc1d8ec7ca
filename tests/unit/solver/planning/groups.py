"""Request groups for tests, with defaults for irrelevant fields."""

from shared.contracts.base import ModelName
from shared.contracts.lanes import LaneKey, LaneLayout
from shared.contracts.qos import Importance
from solver.planning.problem.grouping import GroupId, RequestGroup, Spread


def a_group(model: ModelName, number: int = 0, **fields: object) -> RequestGroup:
    """Ten requests of a hundred tokens, due a minute after Unix time 100."""
    key = LaneKey.of(LaneLayout(), model=model, importance=Importance.LOW, band=5, work=0)
    known = {
        "group_id": GroupId(key.queue_name, number),
        "key": key,
        "num_requests": 10,
        "oldest_deadline_at": 160.0,
        "youngest_deadline_at": 165.0,
        "time_left_s": 60.0,
        "interactive": False,
        "prompt_tokens": Spread(80.0, 30.0),
        "output_tokens": Spread(20.0, 40.0),
    }
    return RequestGroup(**(known | fields))
