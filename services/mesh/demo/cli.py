"""`headway demo`: sends a mixed load to a running mesh and prints a table of the classes."""

import os
import sys
import time
from typing import Annotated

import aiohttp
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from services.mesh.demo.classes import CLASSES, Asked, figures
from services.mesh.demo.http import Gateway
from services.mesh.demo.load import run_load, usable_models
from services.mesh.verbs.options import DEFAULT_GATEWAY, AmqpUrl, gateway_address
from shared.client.client import connect
from shared.contracts.base import Seconds
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import JsonOption, read_by
from shared.runtime.settings import DEFAULT_AMQP_URL

START_S: Seconds = 120.0
"""Time within which the gateway and each model must answer their first request."""
MAX_SECONDS = 600
_WIDTH = 80


def _length(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not 1 <= value <= MAX_SECONDS:
        raise ValueError(f"{text} must be from 1 to {MAX_SECONDS}")
    return value


async def demo(
    *,
    url: Annotated[str, Parameter(env_var="HEADWAY_URL", metavar="URL")] = DEFAULT_GATEWAY,
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    seconds: Annotated[float, read_by(_length, metavar="SECONDS")] = 45.0,
    json: JsonOption = False,
) -> int:
    """
    Send a mixed load to a running mesh, and print a table of it.

    Interactive requests go over HTTP, requests with a deadline and batch requests over AMQP, at the
    same time. HEADWAY_API_KEY has the key.

    Args:
        url: The gateway.
        seconds: Length of the load, 1 to 600.

    Raises:
        SettingsError: The gateway or the models do not answer, or --url is not an address.
        BrokerUnavailableError: The broker does not answer.
    """
    began = time.monotonic()
    address = gateway_address(url)
    key = os.environ.get("HEADWAY_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(address, headers=headers) as session,
        connect(amqp_url, name="headway-demo") as client,
    ):
        gateway = Gateway(session)
        names = await gateway.models(within_s=START_S)
        models = await usable_models(gateway, names, within_s=START_S, say=_say)
        _say(f"sending for {seconds:g} s ...")
        asked = await run_load(gateway, client, models, duration_s=seconds)
    rows = [figures(asked, each) for each in CLASSES]
    sample = next((each for each in asked if each.text.strip()), None)
    wall_s = round(time.monotonic() - began, 1)
    if json:
        print_data({"classes": rows, "answer": sample, "wall_s": wall_s}, as_json=True)
    else:
        show(rows, sample)
        print(f"{wall_s} s in all")
    is_fine = all(row["answered"] and not row["errors"] for row in rows)
    return EXIT_OK if is_fine else EXIT_FAILED


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def show(rows: list[dict[str, object]], sample: Asked | None) -> None:
    """Print the figures of all classes, and one answer."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("class", "over", "target", "requests", "attained"):
        table.add_column(name, no_wrap=name != "target")
    for name in ("first token\np50/p95, s", "whole answer\np50/p95, s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("class", "door", "target", "requests", "attained")),
            _pair(row["first_token_s"]),
            _pair(row["e2e_s"]),
        )
    console = Console(width=_WIDTH, markup=False, highlight=False)
    console.print(table)
    for row in rows:
        for error in row["errors"] if isinstance(row["errors"], list) else ():
            console.print(f"error of {row['class']}: {error}")
    if sample is not None:
        console.print(f"{sample.model}, {sample.name}: {sample.prompt}\n> {sample.text.strip()}")


def _pair(times: object) -> str:
    values = times.values() if isinstance(times, dict) else ()
    return " / ".join("-" if each is None else f"{each:.2f}" for each in values)
