"""Conditions without which the demo compares nothing: serving agents, and an idle machine."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from ops.demo.totals import agent_totals
from services.mesh.spec import AgentSpec
from shared.broker.protocol import Broker
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError
from shared.contracts.telemetry import InstanceStatus, Residency

POLL_S: Seconds = 0.2
MOST_LOAD_PER_CORE = 0.5
"""Load average per core of other programs above which the demo warns; it uses all cores itself."""
MOST_SPREAD = 1.5
"""Largest capacity, as a multiple of the smallest, above which the demo warns."""


def load_warning(load_average: float, *, num_cores: int) -> str | None:
    """Warning if other programs load the machine, by its load average; None if they do not."""
    if load_average <= MOST_LOAD_PER_CORE * num_cores:
        return None
    return (
        f"warning: other programs use this machine (load average {load_average:.1f} on "
        f"{num_cores} cores); the figures say little, and the demo takes longer"
    )


def spread_warning(capacities_rps: Mapping[str, float]) -> str | None:
    """
    Warning if measured capacities differ much; None if they do not.

    Args:
        capacities_rps: What was measured -> requests per second.

    Raises:
        MeshError: A capacity is zero.
    """
    if idle := [name for name, rate_rps in capacities_rps.items() if rate_rps <= 0]:
        raise MeshError(
            f"no token came from {', '.join(idle)} while the capacity was measured: the engine "
            "failed, or the machine is too busy"
        )
    least, most = min(capacities_rps.values()), max(capacities_rps.values())
    if most <= MOST_SPREAD * least:
        return None
    listed = ", ".join(f"{name} {rate_rps:.1f}" for name, rate_rps in capacities_rps.items())
    return (
        f"warning: the capacities differ much, requests/s: {listed}; other programs may have "
        "disturbed the measurement"
    )


async def wait_for_agents(
    broker: Broker, agents: Sequence[AgentSpec], *, timeout_s: Seconds, check: Callable[[], None]
) -> None:
    """
    Wait until each agent has its initial model active, its warm models loaded, and a plan.

    The load is served by agents that have plans, so their capacity is measured with plans also.

    Args:
        broker: A client of the mesh's broker.
        agents: Agents of the mesh.
        timeout_s: Time limit.
        check: Raises an error if a service has ended.

    Raises:
        MeshError: Something is missing after *timeout_s*; the message names it.
    """
    async with agent_totals(broker) as totals:
        try:
            async with asyncio.timeout(timeout_s):
                while missing_parts(agents, totals.newest()):
                    check()
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            missing = "; ".join(missing_parts(agents, totals.newest()))
            raise MeshError(
                f"agents are not ready after {timeout_s:g} s; missing: {missing}"
            ) from error


def missing_parts(agents: Iterable[AgentSpec], statuses: Mapping[str, InstanceStatus]) -> list[str]:
    """What agents should have at the start and do not report: models and plans, by agent."""
    missing = []
    for agent in agents:
        status = statuses.get(agent.instance_id)
        held = {state.model: state.residency for state in (() if status is None else status.models)}
        initial = agent.settings["initial_model"]
        if status is None or status.model != initial:
            missing.append(f"{agent.instance_id}: {initial}")
        missing += [
            f"{agent.instance_id}: {warm}"
            for warm in agent.settings["warm_models"]
            if held.get(warm, Residency.COLD) is Residency.COLD
        ]
        if status is None or status.plan_epoch == 0:
            missing.append(f"{agent.instance_id}: a plan")
    return missing
