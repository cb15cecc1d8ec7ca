"""`headway-agent replay`: runs recorded events through the instance, and prints its decisions."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from services.agent.recording import Begin, records
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.errors import SettingsError
from shared.contracts.requests import QueuedRequest
from shared.runtime import extensions
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.options import AsJson, SecondsOption, path_or_url
from solver.instance.commands import Submit
from solver.instance.instance import Instance
from solver.planning.added_operations import AddedOperation
from solver.planning.lso.operations import Lso
from solver.planning.lso.results import LsoResult

_TEXT_LENGTH = 100


def replay(
    file: Annotated[Path, path_or_url(Path, help="File of the setting `record`.")],
    /,
    *,
    about: Annotated[str | None, Parameter(metavar="TEXT")] = None,
    after: SecondsOption = 0.0,
    every: Annotated[bool, Parameter(name="--all")] = False,
    json: AsJson = False,
) -> int:
    """
    Run recorded events through the instance, and print its commands.

    Args:
        about: Print only events that name TEXT, or a run of the request with the id TEXT.
        after: Print only events from this time after the first on.
        every: Print every event; default: events with commands, or those that --about selects.
    """
    instance: Instance | None = None
    first_at: UnixTime | None = None
    operations = extensions.load_all(extensions.OPERATIONS, AddedOperation)
    names = set() if about is None else {about}
    for now, event in records(file):
        first_at = now if first_at is None else first_at
        if isinstance(event, Begin):
            instance = Instance(event.settings, event.models, now, operations)
            commands: list[Any] = []
        elif instance is None:
            raise SettingsError(f"{file}, record 1: it must describe the instance")
        else:
            commands = instance.handle(event, now)
        lines = [text_of(each) for each in (event, *commands)]
        names |= {
            each.run_id
            for each in commands
            if isinstance(each, Submit) and each.request.request_id in names
        }
        is_shown = any(name in line for name in names for line in lines) if names else commands
        if now - first_at >= after and (is_shown or every):
            _show(now, now - first_at, lines, as_json=json)
    return EXIT_OK


def _show(at: UnixTime, after_s: Seconds, lines: list[str], *, as_json: bool) -> None:
    if as_json:
        print_data({"at": at, "event": lines[0], "commands": lines[1:]}, as_json=True)
        return
    print(f"{after_s:10.3f} {lines[0]}")
    for line in lines[1:]:
        print(f"{'':11}-> {line}")


def text_of(value: object) -> str:
    """An event or a command in one line."""
    named = value.__struct_fields__ if isinstance(value, msgspec.Struct) else ()
    if is_dataclass(value):
        named = tuple(each.name for each in fields(value))
    shown = ", ".join(f"{name}={_brief(getattr(value, name))}" for name in named)
    return f"{type(value).__name__}({shown})"


def _brief(value: object) -> str:
    match value:
        case QueuedRequest():
            return value.request_id
        case Lso():
            return f"{value.kind}: {value.reason.text}"
        case LsoResult():
            return f"{value.outcome.value}: {value.message}"
    text = repr(value)
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]}..."
