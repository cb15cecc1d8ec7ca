"""Depths of the queues in which requests wait: fixed queues, lanes, companions, inboxes."""

from math import inf

import msgspec

from shared.broker import topology
from shared.broker.counting import depths_of
from shared.broker.protocol import Broker
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.lanes import LaneKey, LaneLayout, inbox_name, model_of
from shared.contracts.plans import PlanExplained, PlanRequested
from solver.planning.lanes import all_lanes, band_lower_edge_s, earlier_lanes, queues_of

LEADER_TIMEOUT_S = 3.0
_decode_plan: Decoder[PlanExplained] = Decoder(PlanExplained)


class QueueCount(msgspec.Struct, frozen=True, kw_only=True):
    """Depth of one queue."""

    queue: str
    ready: int
    consumers: int


async def ask_leader(broker: Broker) -> PlanExplained | None:
    """Ask the leader for its lanes and instances; None if no leader answers."""
    plan = await ask(
        broker,
        topology.CONTROL_PLAN,
        lambda reply_to: PlanRequested(reply_to=reply_to),
        _decode_plan,
        timeout_s=LEADER_TIMEOUT_S,
    )
    return plan if isinstance(plan, PlanExplained) else None


async def count_queues(
    broker: Broker,
    models: tuple[ModelName, ...] | None,
    layout: LaneLayout,
    plan: PlanExplained | None = None,
) -> list[QueueCount]:
    """
    Depths of all fixed queues, and of all existing lanes, companions and inboxes.

    Args:
        broker: Broker with the queues.
        models: Models whose lanes are counted; None: all that the leader names.
        layout: Lane layout that the operator configured.
        plan: The leader's answer, which names the queues that exist; None: every possible queue of
            *models* is counted, and inboxes are left out.
    """
    names = {spec.name for spec in topology.QUEUES}
    if plan is not None and plan.work_queues:
        known = plan.work_queues
        names.update(each for each in known if models is None or model_of(each) in models)
    elif models is not None:
        names.update(queues_of(all_lanes(models, layout) + earlier_lanes(models, layout)))
    if plan is not None:
        names.update(inbox_name(instance_id) for instance_id in plan.instances)
    return [
        QueueCount(queue=name, ready=depth.ready, consumers=depth.consumers)
        for name, depth in (await depths_of(broker, names)).items()
        if depth is not None
    ]


def layout_of(text: str | None) -> LaneLayout:
    """
    Lane layout of the mesh.

    Args:
        text: Value of the environment variable that the services also read; None if it is not set.

    Raises:
        SettingsError: The value is invalid.
    """
    try:
        return LaneLayout() if text is None else msgspec.json.decode(text, type=LaneLayout)
    except msgspec.DecodeError as error:
        raise SettingsError(f"HEADWAY_LAYOUT: {error}") from error


def meaning_of(queue: str, layout: LaneLayout) -> str:
    """
    Describe the requests in a lane or companion queue; empty for other queues.

    The description of a queue of another layout has no limits of deadlines and tokens.
    """
    kind = queue.partition(".")[0]
    if kind == "relegated":
        return "requests whose SLO cannot be met"
    if kind == "resume":
        *_, version, _, band = queue.split(".")
        due = _due(int(band), layout) if int(version) == layout.version else ""
        return f"interrupted requests{due}"
    if kind not in ("lane", "overflow"):
        return ""
    key = LaneKey.parse(queue)
    whose = ", of tenants above their share" if kind == "overflow" else ""
    if key.layout != layout.version:
        return f"importance {key.importance}, of layout {key.layout}{whose}"
    work = _work(int(key.work.removeprefix("w")), layout)
    return f"importance {key.importance}{_due(key.band, layout)}, {work}{whose}"


def _due(band: int, layout: LaneLayout) -> str:
    if band == layout.best_effort_band:
        return ", no deadline"
    low_s, high_s = band_lower_edge_s(band, layout), band_lower_edge_s(band + 1, layout)
    if band == 0:
        return f", due in under {high_s:.3g} s"
    return (
        f", due in {low_s:.3g} to {high_s:.3g} s" if high_s < inf else f", due after {low_s:.3g} s"
    )


def _work(work: int, layout: LaneLayout) -> str:
    edge = layout.first_work_tokens * layout.work_ratio**work
    if work == 0:
        return f"up to {edge:.0f} tokens"
    if work == layout.num_work_classes - 1:
        return f"over {edge / layout.work_ratio:.0f} tokens"
    return f"{edge / layout.work_ratio:.0f} to {edge:.0f} tokens"
