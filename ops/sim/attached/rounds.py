"""One load at attached servers, served in virtual time by each of several fronts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ops.sim.attached.fronts import (
    BATCH,
    INTERACTIVE,
    PRIORITIES,
    ClientSideBalancer,
    Front,
    LoadRequest,
)
from ops.sim.attached.mesh import Mesh
from ops.sim.attached.outcomes import Outcome
from ops.sim.attached.servers import Device, Server
from ops.sim.attached.timeline import Timeline
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.qos import Importance, Slo

_WARM_UP_S: Seconds = 2.0
"""Time for which batch requests run before the load begins."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    at_s: Seconds
    class_name: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Servers, targets and batch work."""

    latency: LatencyCoefficients
    slos: Mapping[str, Slo]
    num_servers: int = 2
    num_batch: int = 24
    """Number of batch requests that are always open."""
    batch_prompt: int = 96
    batch_tokens: int = 64
    patience_s: Seconds = 8.0
    """Time after the last arrival in which answers may end."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a front has done with a load."""

    requests: Sequence[LoadRequest]
    batch_tokens: int
    busy_s: Seconds
    """Time during which the device computed."""


MakeFront = Callable[[Timeline, Sequence[Server]], Front]


def client(*, least_loaded: bool, has_priorities: bool) -> MakeFront:
    """A client that chooses the server."""
    return lambda timeline, servers: ClientSideBalancer(
        timeline=timeline,
        servers=servers,
        least_loaded=least_loaded,
        has_priorities=has_priorities,
    )


def mesh(published: LatencyCoefficients) -> MakeFront:
    """A mesh whose estimator has published this latency model."""
    return lambda timeline, servers: Mesh(timeline, servers, published)


def serve(
    make_front: MakeFront, arrivals: Sequence[Arrival], duration_s: Seconds, setup: Setup
) -> Served:
    """Serve *arrivals* beside batch requests."""
    timeline = Timeline()
    device = Device(timeline)
    servers = [Server(timeline, device, setup.latency) for _ in range(setup.num_servers)]
    front = make_front(timeline, servers)
    requests: list[LoadRequest] = []
    batch: list[LoadRequest] = []

    def send_batch() -> None:
        request = LoadRequest(
            class_name=BATCH,
            prompt_tokens=setup.batch_prompt,
            output_tokens=setup.batch_tokens,
            slo=Slo(),
            importance=Importance.LOW,
            outcome=Outcome(timeline.now),
            priority=PRIORITIES[BATCH],
            ended=send_batch,
        )
        batch.append(request)
        front.send(request)

    def send(arrival: Arrival) -> None:
        request = LoadRequest(
            class_name=arrival.class_name,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            slo=setup.slos[arrival.class_name],
            importance=Importance.HIGH if arrival.class_name == INTERACTIVE else Importance.LOW,
            outcome=Outcome(timeline.now),
            priority=PRIORITIES[arrival.class_name],
        )
        requests.append(request)
        front.send(request)

    def num_tokens() -> int:
        return sum(request.outcome.num_tokens for request in batch)

    for _ in range(setup.num_batch):
        timeline.after(0.0, send_batch)
    for arrival in arrivals:
        timeline.at(_WARM_UP_S + arrival.at_s, partial(send, arrival))
    timeline.run(_WARM_UP_S)
    num_before, busy_before_s = num_tokens(), device.busy_s
    timeline.run(_WARM_UP_S + duration_s)
    num_batch_tokens, busy_s = num_tokens() - num_before, device.busy_s - busy_before_s
    timeline.run(timeline.now + setup.patience_s)
    return Served(requests, num_batch_tokens, busy_s)
