"""`headway top` and `headway queues`: what the mesh does, and what waits."""

import os
import sys

from rich import box
from rich.table import Table

from services.mesh.queues import ask_leader, count_queues, layout_of, meaning_of
from services.mesh.spec import EMBEDDED_SEEN
from services.mesh.top import watch
from services.mesh.verbs.options import AmqpUrl, file_of
from services.mesh.verbs.tables import print_tables
from shared.broker.declaring import declare_topology
from shared.contracts.errors import MeshError
from shared.models.registry import ModelRegistry
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.options import File, JsonOption
from shared.runtime.settings import DEFAULT_AMQP_URL, masked_url


async def top(
    *, once: bool = False, amqp_url: AmqpUrl = DEFAULT_AMQP_URL, json: JsonOption = False
) -> int:
    """
    Show instances, their work and SLO attainment continuously.

    Args:
        once: Print one snapshot instead of a live view.

    Raises:
        MeshError: No instance reports.
    """
    is_live = not (once or json)
    async with broker_factory(amqp_url)("headway-top") as broker:
        await declare_topology(broker)
        view = await watch(broker, duration_s=float("inf") if is_live else 2.0, live=is_live)
    if json:
        print_data(view.data(), as_json=True)
    elif once and view.instances:
        print_tables(*view.tables())
    if not view.instances:
        raise MeshError(
            f"no instance reports at {masked_url(amqp_url)}: is it the broker of the mesh "
            f"(--amqp-url)? {EMBEDDED_SEEN}"
        )
    return EXIT_OK


async def queues(
    *,
    registry: File | None = None,
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    json: JsonOption = False,
) -> int:
    """
    Print the number of waiting requests in each queue, lane and inbox.

    Args:
        registry: Models whose lanes are counted (default: HEADWAY_REGISTRY, else the models of all
            lanes that the leader names).
    """
    file = registry or file_of("HEADWAY_REGISTRY")
    models = None if file is None else ModelRegistry.load(file).bases
    layout = layout_of(os.environ.get("HEADWAY_LAYOUT"))
    async with broker_factory(amqp_url)("headway-queues") as broker:
        plan = await ask_leader(broker)
        if plan is None:
            left_out = "inboxes" if models is not None else "lanes (see --registry) and inboxes"
            print(f"no answer from a leader: {left_out} are left out", file=sys.stderr)
            print(EMBEDDED_SEEN, file=sys.stderr)
        counts = await count_queues(broker, models, layout, plan)
    if json:
        print_data(counts, as_json=True)
        return EXIT_OK
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("queue", no_wrap=True)
    table.add_column("ready", justify="right", no_wrap=True)
    table.add_column("consumers", justify="right", no_wrap=True)
    table.add_column("requests")
    for entry in counts:
        meaning = meaning_of(entry.queue, layout)
        table.add_row(entry.queue, str(entry.ready), str(entry.consumers), meaning)
    print_tables(table)
    return EXIT_OK
