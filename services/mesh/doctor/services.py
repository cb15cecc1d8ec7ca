"""The services of a running mesh: which of them answer, and whether their clocks agree."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from services.mesh.doctor.findings import Finding, deviation, note, ok
from services.mesh.doctor.instances import on_instances
from services.mesh.queues import ask_leader
from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder, InstanceId, Seconds
from shared.contracts.errors import MeshError
from shared.contracts.telemetry import InstanceStatus, LanesObserved
from shared.runtime.clock import Clock

LISTEN_S: Seconds = 1.5
"""Agents and groupers report each second."""
ANSWER_S: Seconds = 2.5
"""The leader answers between two plans, each of which may take one to two seconds."""
MOST_SKEW_S: Seconds = 1.0
_decode: Decoder[InstanceStatus | LanesObserved] = Decoder(InstanceStatus | LanesObserved)
_READERS = {
    "leader": (topology.LEADER, "no plans are made: agents keep their last plan"),
    "grouper": (topology.GLOBAL_REST, "requests wait in the global queues"),
    "estimator": (topology.ESTIMATOR, "nothing is learnt: predictions stay as they are"),
}
"""Service -> the queue that it reads, and what follows if no service reads it."""


async def answering(broker: Broker, clock: Clock) -> AsyncIterator[Finding]:
    """Findings about services; none if the mesh does not run."""
    consumers: dict[str, int] = {}
    for service, (queue, _) in _READERS.items():
        depth = await broker.depth(queue)
        consumers[service] = 0 if depth is None else depth.consumers
    if not any(consumers.values()):
        yield note("services", "no mesh runs on this virtual host")
        return
    for service, (queue, consequence) in _READERS.items():
        if not consumers[service]:
            yield deviation(
                "services", f"no {service} reads {queue}", so=consequence, do=f"start a {service}"
            )
    try:
        heard, answers = await asyncio.gather(_heard(broker, clock), _leader_answers(broker))
    except MeshError as error:
        yield note("services", f"cannot be listened to: {error}")
        return
    if consumers["leader"] and not answers:
        yield deviation(
            "services",
            "the leader does not answer",
            so="no plans are made: agents keep their last plan",
            do="look at the leader's log and health",
        )
    for finding in (*of_peers(heard.ages_s), *on_instances(heard.instances)):
        yield finding


def of_peers(heard: dict[str, Seconds]) -> Iterator[Finding]:
    """Findings about agents and groupers, by the ages of their last reports."""
    agents = [name for name in heard if name.startswith("agent")]
    if not agents:
        yield deviation(
            "services",
            f"no agent has reported in {LISTEN_S:g} s",
            so="requests wait in lanes",
            do="start agents, or look at their logs",
        )
    else:
        yield ok("services", f"{len(agents)} agents, {len(heard) - len(agents)} groupers report")
    for name, age_s in heard.items():
        if abs(age_s) > MOST_SKEW_S:
            yield deviation(
                "clocks",
                f"the last report of {name} is {age_s:.1f} s old by this machine's clock",
                so="deadlines and ages of requests are wrong by this time",
                do="synchronize the clocks of all machines (NTP)",
            )


@dataclass(slots=True)
class _Heard:
    """Reports of a mesh."""

    ages_s: dict[str, Seconds] = field(default_factory=dict)
    """Agents and groupers that report -> age of the last report."""
    statuses: dict[InstanceId, InstanceStatus] = field(default_factory=dict)

    @property
    def instances(self) -> list[InstanceStatus]:
        return [self.statuses[name] for name in sorted(self.statuses)]


async def _heard(broker: Broker, clock: Clock) -> _Heard:
    """What agents and groupers report now."""
    heard = _Heard()

    def on_report(report: InstanceStatus | LanesObserved) -> None:
        if isinstance(report, InstanceStatus):
            name = f"agent {report.instance_id}"
            heard.statuses[report.instance_id] = report
        else:
            name = f"grouper {report.sender}"
        heard.ages_s[name] = clock.now() - report.at

    queue = topology.temporary_queue("show-doctor")
    keys = [(topology.TELEMETRY, key) for key in (topology.STATUS_KEYS, topology.LANES_KEY)]
    async with listening(broker, queue, _decode, keys, on_report):
        await asyncio.sleep(LISTEN_S)
    return heard


async def _leader_answers(broker: Broker) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await ask_leader(broker) is not None
    except TimeoutError:
        return False
