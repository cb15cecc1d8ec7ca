"""One example of every message of `shared.contracts.lanes`, and the lane of all examples."""

from shared.contracts.base import Message
from shared.contracts.lanes import LaneLayout

LANE = "lane.1.tiny.high.3.short"

EXAMPLES: tuple[Message, ...] = (
    LaneLayout(
        version=2,
        first_band_s=0.25,
        band_ratio=2.0,
        num_bands=10,
        work_edge_tokens=512,
        work_version=3,
        work_edges={"tiny": 724},
    ),
)
