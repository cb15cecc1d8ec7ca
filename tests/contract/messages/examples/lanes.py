"""The lane that all examples use, and one example of every message of `shared.contracts.lanes`."""

from shared.contracts.base import Message
from shared.contracts.lanes import QueuesListed

LANE = "lane.2.tiny.high.3.w1"

EXAMPLES: tuple[Message, ...] = (QueuesListed(queues=(LANE, "relegated.tiny"), complete=True),)
