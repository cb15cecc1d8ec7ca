"""Records of finished requests over the broker: sent in groups, and asked for."""

from collections.abc import Callable

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, Seconds
from shared.contracts.stories.questions import StoriesReported, StoriesRequested
from shared.contracts.stories.story import (
    PulledRequest,
    RequeuedRequest,
    StoriesObserved,
    Story,
)

PERIOD_S: Seconds = 0.25
"""Time for which records are gathered."""
MOST_AT_ONCE = 500
"""Maximum number of records in one message."""
MOST_WAITING = 20_000
"""Records beyond this number are dropped until the next message."""
TIMEOUT_S: Seconds = 5.0
_decode: Decoder[StoriesReported] = Decoder(StoriesReported)


class StoryOutbox:
    """
    Gathers what a process knows about the lives of requests; methods that add return at once.

    Args:
        broker: The broker.
        sender: Instance, or name of the process.
    """

    def __init__(self, broker: Broker, sender: str) -> None:
        self._broker = broker
        self._sender = sender
        self._pulled: list[PulledRequest] = []
        self._requeued: list[RequeuedRequest] = []
        self._ended: list[Story] = []

    def pulled(self, request: PulledRequest) -> None:
        """Add a request that this instance has pulled."""
        if len(self._pulled) < MOST_WAITING:
            self._pulled.append(request)

    def requeued(self, request: RequeuedRequest) -> None:
        """Add a request that this instance has returned to a queue."""
        if len(self._requeued) < MOST_WAITING:
            self._requeued.append(request)

    def ended(self, story: Story) -> None:
        """Add a request that this process has ended."""
        if len(self._ended) < MOST_WAITING:
            self._ended.append(story)

    async def send(self) -> None:
        """Send what was gathered, without confirms; called every `PERIOD_S`."""
        pulled, requeued, ended = self._pulled, self._requeued, self._ended
        self._pulled, self._requeued, self._ended = [], [], []
        for first in range(0, max(len(pulled), len(requeued), len(ended)), MOST_AT_ONCE):
            part = slice(first, first + MOST_AT_ONCE)
            observed = StoriesObserved(
                sender=self._sender,
                pulled=tuple(pulled[part]),
                requeued=tuple(requeued[part]),
                ended=tuple(ended[part]),
            )
            message = OutMessage.transient(observed)
            await send_best_effort(self._broker, topology.TELEMETRY, topology.STORIES_KEY, message)


async def ask_stories(
    broker: Broker, question: Callable[[str], StoriesRequested]
) -> StoriesReported | None:
    """The answer of a process that keeps records of requests; None if there is none."""
    answer = await ask(broker, topology.CONTROL_STORIES, question, _decode, timeout_s=TIMEOUT_S)
    return answer if isinstance(answer, StoriesReported) else None
