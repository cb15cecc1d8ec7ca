"""`headway usage`: what finished requests of tenants have used."""

import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from rich import box
from rich.table import Table

from services.mesh.spec import EMBEDDED_SEEN
from services.mesh.verbs.options import AmqpUrl, Tenant, TimeText
from services.mesh.verbs.tables import print_tables
from shared.contracts.base import TenantId
from shared.contracts.tenants.usage import UsageReported, UsageRequested, UsageRow
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import JsonOption
from shared.runtime.settings import DEFAULT_AMQP_URL
from shared.tenants.usage_questions import ask_usage, parse_time


async def usage(
    *,
    tenant: Tenant | None = None,
    since: TimeText = "30d",
    until: TimeText | None = None,
    by: tuple[Literal["hour", "model", "class"], ...] = (),
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    json: JsonOption = False,
) -> int:
    """
    Print what finished requests of tenants have used.

    Args:
        since: First hour: a date, Unix seconds, or a duration before now.
        until: End; default: now.
        by: One row for each; may be repeated.
    """
    now = SystemClock().now()
    begin = parse_time(since, now, param="--since")
    end = None if until is None else parse_time(until, now, param="--until")
    columns = ("tenant", *by)
    async with broker_factory(amqp_url)("headway-usage") as broker:
        found = await ask_usage(
            broker,
            lambda reply_to: UsageRequested(
                reply_to=reply_to,
                tenant=None if tenant is None else TenantId(tenant),
                since=begin,
                until=end,
                by=columns,
            ),
        )
    if found is None:
        print(f"no answer: is an estimator running? {EMBEDDED_SEEN}", file=sys.stderr)
        return EXIT_FAILED
    if json:
        print_data([_data(row) for row in found.rows], as_json=True)
    else:
        print_tables(table_of(found, columns))
    return EXIT_OK


def _data(row: UsageRow) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(row)
    return values | {"total_tokens": row.total_tokens}


def table_of(found: UsageReported, by: tuple[str, ...]) -> Table:
    """Table of rows by the columns *by*; only times are wrapped in a narrow terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in by:
        table.add_column(name, no_wrap=name != "hour")
    for name in ("completed", "failed", "prompt", "cached", "completion", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        completed = row.requests.get("completed", 0)
        fields = {
            "tenant": row.tenant,
            "hour": datetime.fromtimestamp(row.hour, UTC).isoformat(sep=" ", timespec="minutes"),
            "model": row.model,
            "class": row.qos_class,
        }
        numbers = (
            completed,
            sum(row.requests.values()) - completed,
            row.prompt_tokens,
            row.cached_tokens,
            row.completion_tokens,
            row.total_tokens,
        )
        table.add_row(*(fields[name] for name in by), *(str(each) for each in numbers))
    return table
