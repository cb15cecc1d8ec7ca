"""`headway usage`: what finished requests of tenants have used."""

import argparse
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from shared.contracts.base import TenantId
from shared.contracts.tenants.usage import UsageReported, UsageRequested, UsageRow
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.tenants.usage_questions import ask_usage, parse_time


async def usage(options: argparse.Namespace) -> int:
    """Print usage by tenant, and by what else the options name."""
    now = SystemClock().now()
    since = parse_time(options.since, now, param="--since")
    until = None if options.until is None else parse_time(options.until, now, param="--until")
    by = ("tenant", *(each for each in options.by or () if each != "tenant"))
    async with broker_factory(options.amqp_url)("headway-usage") as broker:
        found = await ask_usage(
            broker,
            lambda reply_to: UsageRequested(
                reply_to=reply_to,
                tenant=None if options.tenant is None else TenantId(options.tenant),
                since=since,
                until=until,
                by=by,
            ),
        )
    if found is None:
        print("no answer: is an estimator running?", file=sys.stderr)
        return EXIT_FAILED
    if options.json:
        print_data([_data(row) for row in found.rows], as_json=True)
    else:
        Console().print(_table(found, by))
    return EXIT_OK


def _data(row: UsageRow) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(row)
    return values | {"total_tokens": row.total_tokens}


def _table(found: UsageReported, by: tuple[str, ...]) -> Table:
    table = Table()
    for name in by:
        table.add_column(name, overflow="fold")
    for name in ("completed", "failed", "prompt", "cached", "completion", "total"):
        table.add_column(name, justify="right")
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
