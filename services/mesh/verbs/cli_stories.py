"""`headway request show` and `headway requests`: finished requests, and why they were late."""

import os
import sys
import textwrap
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from rich.table import Table

from services.mesh.queues import layout_of, meaning_of
from services.mesh.spec import EMBEDDED_SEEN
from services.mesh.verbs.options import AmqpUrl, Tenant, TimeText
from services.mesh.verbs.tables import add_columns, print_tables
from shared.broker.stories import ask_stories
from shared.contracts.base import RequestId, TenantId, UnixTime
from shared.contracts.stories.questions import MAX_STORIES, StoriesReported, StoriesRequested
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import JsonOption, read_by, whole
from shared.runtime.settings import DEFAULT_AMQP_URL
from shared.tenants.usage_questions import parse_time
from solver.stories.sentence import seconds
from solver.stories.view import StoryView, view_of

NO_KEEPER = f"no answer: is an estimator running, with the setting `stories`? {EMBEDDED_SEEN}"
WIDTH = 80


def _show(text: str) -> str:
    """The only verb of `request`; other words are those of `headway requests`, or an id."""
    if text in ("list", "ls"):
        raise ValueError(f"{text!r} is not a verb; `headway requests` lists requests")
    if text != "show":
        raise ValueError(f"{text!r} is not a verb; did you mean `headway request show {text}`?")
    return text


async def show_request(
    _action: Annotated[Literal["show"], read_by(_show, name="action")],
    request_id: Annotated[str, Parameter(name="id")],
    /,
    *,
    tenant: Tenant | None = None,
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    json: JsonOption = False,
) -> int:
    """
    Show the life of a finished request, and why it was late.

    Args:
        _action: Print the record of one request.
        request_id: Id of the request.
    """
    found = await _ask(
        amqp_url,
        StoriesRequested(reply_to="", tenant=_tenant(tenant), request_id=RequestId(request_id)),
    )
    problem = _problem(request_id, found)
    if found is None or problem:
        print(problem, file=sys.stderr)
        return EXIT_FAILED
    view = view_of(found.stories[0])
    if json:
        print_data(view, as_json=True)
    else:
        _print(view)
    return EXIT_OK


async def show_requests(
    *,
    late: bool = False,
    since: TimeText = "10m",
    limit: Annotated[int, whole(least=1, most=MAX_STORIES)] = 50,
    tenant: Tenant | None = None,
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    json: JsonOption = False,
) -> int:
    """
    List requests that ended recently, newest first, with the reason of each late one.

    Args:
        late: Only requests that were late.
        since: Requests that ended since then: a duration before now, a date, or Unix seconds.
        limit: Print at most the N newest requests; at most 1000.
    """
    begin = parse_time(since, SystemClock().now(), param="--since")
    found = await _ask(
        amqp_url,
        StoriesRequested(
            reply_to="",
            tenant=_tenant(tenant),
            only_late=late,
            since=begin,
            limit=limit,
        ),
    )
    if found is None:
        print(NO_KEEPER, file=sys.stderr)
        return EXIT_FAILED
    if found.heard_since > begin:
        print(f"records are kept since {_clock(found.heard_since)}", file=sys.stderr)
    views = [view_of(each) for each in found.stories]
    if json:
        print_data(views, as_json=True)
    else:
        for view in views:
            named = f"{_plain(view.id)}  {_plain(view.tenant)}"
            print(f"{_clock(view.finished_at)}  {named}  {view.qos_class}")
            print(_wrapped(view.sentence, indent="  "))
        print(f"{len(views)} requests", file=sys.stderr)
    return EXIT_OK


async def _ask(amqp_url: str, asked: StoriesRequested) -> StoriesReported | None:
    async with broker_factory(amqp_url)("headway-show") as broker:
        return await ask_stories(
            broker, lambda reply_to: msgspec.structs.replace(asked, reply_to=reply_to)
        )


def _tenant(name: str | None) -> TenantId | None:
    return None if name is None else TenantId(name)


def _problem(request_id: str, found: StoriesReported | None) -> str:
    """Why no single record can be printed; empty if it can."""
    if found is None:
        return NO_KEEPER
    tenants = [each.tenant for each in found.stories]
    if len(tenants) > 1:
        return f"several tenants have a request {request_id}: use --tenant ({', '.join(tenants)})"
    if tenants:
        return ""
    if found.held:
        held = found.held[0]
        return (
            f"request {request_id} has not ended: {held.instance_id} pulled it at "
            f"{_clock(held.at)} UTC"
        )
    return (
        f"there is no record of request {request_id}: it is unknown or has not ended, or it ended "
        f"before {_clock(found.heard_since)} UTC (records are kept for "
        f"{seconds(found.kept_s)} at most)"
    )


def _print(view: StoryView) -> None:
    print(f"request {_plain(view.id)} of {_plain(view.tenant)}: {_outcome(view)}")
    print(_wrapped(view.sentence))
    print()
    for name, text in _facts(view):
        print(f"{name:<10} {text}")
    print()
    history = ("", _history(view)) if view.history else ()
    print_tables(_phases(view), *history, width=WIDTH)


def _outcome(view: StoryView) -> str:
    verdict = "late" if view.late else "in time" if view.attained else "not served"
    return f"{view.outcome}, {verdict}"


def _facts(view: StoryView) -> list[tuple[str, str]]:
    """Names and values of the facts that the tables do not have."""
    facts = [("model", _plain(view.model) or "-"), ("class", f"{view.qos_class}{_targets(view)}")]
    if view.session:
        facts.append(("session", _plain(view.session)))
    if view.lane:
        layout = layout_of(os.environ.get("HEADWAY_LAYOUT"))
        facts += [("lane", view.lane), ("", meaning_of(view.lane, layout))]
    predicted = "-" if view.predicted_wait_s is None else seconds(view.predicted_wait_s)
    waited = "-" if view.waited_s is None else seconds(view.waited_s)
    facts.append(("wait", f"{waited} until its first run (predicted: {predicted})"))
    if view.first_token_at is not None:
        facts.append(("first", f"token after {seconds(view.first_token_at - view.arrived_at)}"))
    facts.append(("tokens", f"{view.prompt_tokens} + {view.output_tokens}"))
    if view.late_tokens:
        facts.append(("", f"{view.late_tokens} late, longest gap {seconds(view.max_tbt_s)}"))
    if view.hops:
        facts.append(("hops", str(view.hops)))
    return facts


def _targets(view: StoryView) -> str:
    slo = view.slo
    targets = {"TTFT": slo.ttft_s, "TBT": slo.tbt_s, "TTLT": slo.ttlt_s}
    known = [f"{name} {seconds(at)}" for name, at in targets.items() if at is not None]
    if slo.deadline_at is not None:
        known.append(f"deadline {_clock(slo.deadline_at)}")
    return f" ({', '.join(known)})" if known else ""


def _phases(view: StoryView) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("after", justify="right")
    table.add_column("took", justify="right")
    add_columns(table, ("phase", "instance"))
    table.add_column("lost")
    lost = {each.phase: each.lost_s for each in view.lost}
    for each in view.phases:
        table.add_row(
            seconds(each.begun_at - view.arrived_at),
            seconds(each.duration_s),
            each.phase,
            each.instance or "-",
            seconds(lost.pop(each.phase)) if each.phase in lost else "",
        )
    return table


def _history(view: StoryView) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("after", justify="right")
    add_columns(table, ("instance",))
    for name in ("step", "why"):
        table.add_column(name, overflow="fold")
    for each in view.history:
        table.add_row(seconds(each.at - view.arrived_at), each.instance, each.what, each.why)
    return table


def _wrapped(text: str, *, indent: str = "") -> str:
    """Text in lines of at most `WIDTH` characters."""
    return textwrap.fill(_plain(text), WIDTH, initial_indent=indent, subsequent_indent=indent)


def _plain(text: str) -> str:
    """Text of producers without characters that control a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _clock(at: UnixTime) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")[:19]
