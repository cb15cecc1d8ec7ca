"""Command line of all services: run, check-config, health, topology, and verbs of the service."""

import asyncio
import inspect
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec
from cyclopts import Group, Parameter

from shared.broker import topology
from shared.broker.connect import check_broker_url, open_broker
from shared.broker.protocol import BrokerFactory
from shared.contracts.errors import SettingsError
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.health import Health, serve_health
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, run_service
from shared.runtime.logging import configure_logging
from shared.runtime.options import LOADED, AsJson, File
from shared.runtime.program import Program, call, commands
from shared.runtime.settings import ServiceSettings, load, masked
from shared.tracing.opening import opened_tracer
from shared.tracing.spans import Tracer

S = TypeVar("S", bound=ServiceSettings)
_SHARED = Parameter(group=Group("Options of all verbs", sort_key=1))
CLOSE_GRACE_S = 15.0
"""Time after a drain for requeuing unfinished requests and closing connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports(Generic[S]):
    """Settings of a service, and its external dependencies: broker, clock, health and tracer."""

    settings: S
    open_broker: BrokerFactory
    clock: Clock
    health: Health
    tracer: Tracer | None = None
    """Exports traces; None: there are none."""


class Serve(Protocol[S]):
    """Function that creates and runs a service until *stop*, then drains it and returns."""

    async def __call__(self, ports: Ports[S], stop: asyncio.Event) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(Generic[S]):
    """What a service runs."""

    serve: Serve[S]
    check: Callable[[S], None] = lambda _settings: None
    """
    Checks settings that fit the schema; raises `SettingsError` if the service cannot run with them.
    """


class ServiceCli(Program, Generic[S]):
    """
    Command line of one service.

    A verb is a function of typed options. Its parameter `settings` gets the settings of the
    service, and its parameter `json` whether `--json` is given.

    Args:
        service: Name of the service.
        text: What the service does.
        settings_type: Type of its settings.
        parts: Imports the service; `health` and verbs without settings do not need it.
        prog: Name of the program; default: `headway-` and the name of the service.
    """

    def __init__(
        self,
        *,
        service: str,
        text: str,
        settings_type: type[S],
        parts: Callable[[], Service[S]],
        prog: str | None = None,
    ) -> None:
        self.service = service
        self.settings_type = settings_type
        self.parts = parts
        variables = f"HEADWAY_{service.upper()}_<FIELD> and HEADWAY_AMQP_URL"
        codes = "0 ok, 1 failed, 2 usage or settings, 3 broker unreachable"
        notes = f"Settings also come from {variables}.\nExit codes: {codes}."
        super().__init__(commands(prog or f"headway-{service}", text, examples=notes))
        self.app.meta.default(self._launch)
        self.app.command(self.serve, name="run")
        for verb in (_check_config, _health, _topology, self.completion):
            self.app.command(verb)

    def run(self, tokens: Sequence[str]) -> int:
        """Run the verb that *tokens* name, with the settings of the service if it needs them."""
        function, bound, _ = self.app.meta.parse_args(
            tokens, print_error=False, exit_on_error=False
        )
        return call(function, bound)

    def shared_options(self) -> tuple[str, ...]:
        """Options of all verbs besides their own."""
        own = self.app.meta.assemble_argument_collection()
        names = (name for each in own for name in each.names if name.startswith("-"))
        return (*super().shared_options(), *names)

    def title(self, tokens: Sequence[str]) -> str:
        """Name of the service in errors, which is that of its logs, and of a nested verb."""
        verb = self.app.meta.parse_commands(tokens)[0]
        return f"headway-{self.service}" + (f": {' '.join(verb)}" if len(verb) > 1 else "")

    def _launch(
        self,
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        config: Annotated[File | None, _SHARED] = None,
        assignments: Annotated[
            tuple[str, ...], _SHARED, Parameter(name="--set", metavar="FIELD=VALUE")
        ] = (),
        json: Annotated[bool, _SHARED] = False,
    ) -> int:
        """
        Run a verb.

        Args:
            config: Settings file (JSON).
            assignments: Set one setting; dots separate nested fields; overrides environment and
                file.
            json: Machine-readable output.
        """
        function, bound, ignored = self.parsed(tokens)
        if "settings" in ignored:
            overrides = dict(_assignment(text) for text in assignments)
            if function == self.serve:
                overrides |= {name: str(value) for name, value in bound.arguments.items()}
            bound.arguments["settings"] = self._settings(function, config, overrides)
        if "json" in ignored:
            bound.arguments["json"] = json
        if inspect.iscoroutinefunction(function):
            configure_logging(level="warning", service=self.service)
        return call(function, bound)

    def _settings(
        self, function: Callable[..., Any], config: Path | None, overrides: dict[str, str]
    ) -> S:
        settings = load(
            self.settings_type,
            service=self.service,
            environ=os.environ,
            file=config,
            overrides=overrides,
        )
        if function is not _health:
            check_broker_url(settings.amqp_url)
            self.parts().check(settings)
        return settings

    def serve(self, *, settings: Annotated[Any, LOADED]) -> int:
        """Serve until SIGTERM, then drain."""
        configure_logging(level=settings.log_level, service=self.service)
        serve = self.parts().serve

        async def main(stop: asyncio.Event) -> None:
            health = Health(service=self.service)
            async with (
                opened_tracer(self.service, os.environ) as tracer,
                serve_health(health, host=settings.health_host, port=settings.health_port),
            ):
                ports = Ports(
                    settings=settings,
                    open_broker=broker_factory(settings.amqp_url),
                    clock=SystemClock(),
                    health=health,
                    tracer=tracer,
                )
                await serve(ports, stop)

        return run_service(self.service, main, limit_s=settings.drain_timeout_s + CLOSE_GRACE_S)


def _check_config(*, settings: Annotated[ServiceSettings, LOADED], json: AsJson = False) -> int:
    """Print the effective settings, secrets masked."""
    print_data(masked(settings), as_json=json)
    return EXIT_OK


def _topology(*, json: AsJson = False) -> int:
    """Print the exchanges and queues that the mesh uses."""
    data = {
        "exchanges": topology.EXCHANGES,
        "queues": (*topology.QUEUES, *topology.DELAY_QUEUES),
        "bindings": (*topology.BINDINGS, *topology.DELAY_BINDINGS),
    }
    print_data(data, as_json=json)
    return EXIT_OK


def _health(*, settings: Annotated[ServiceSettings, LOADED], json: AsJson = False) -> int:
    """
    Check if the running service is ready.

    Raises:
        SettingsError: The service has no health endpoint.
    """
    host, port = settings.health_address
    if port == 0:
        raise SettingsError("health_port is 0: this service has no health endpoint")
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/ready"  # noqa: S104 - asked, not bound
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            body, ready = response.read(), True
    except urllib.error.HTTPError as error:
        body, ready = error.read(), False
    except OSError as error:
        body, ready = msgspec.json.encode({"ready": False, "error": str(error)}), False
    print_data(msgspec.json.decode(body), as_json=json)
    return EXIT_OK if ready else EXIT_FAILED


def broker_factory(url: str) -> BrokerFactory:
    """Function that connects a client to *url* under a given client name."""
    return partial(open_broker, url)


def print_data(value: Any, *, as_json: bool) -> None:
    """Print data to stdout, as one JSON line or as indented text."""
    encoded = msgspec.json.encode(value)
    print((encoded if as_json else msgspec.json.format(encoded, indent=2)).decode())


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set needs FIELD=VALUE, not {text!r}")
    return name, value
