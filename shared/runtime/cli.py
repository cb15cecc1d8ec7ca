"""Command line of all services: run, check-config, health, topology, and verbs of the service."""

import argparse
import asyncio
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shared.broker import topology
from shared.broker.connect import open_broker
from shared.broker.protocol import BrokerFactory
from shared.contracts.errors import BrokerUnavailableError, MeshError, SettingsError
from shared.runtime.arguments import HelpFormatter, common_options
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.health import Health, serve_health
from shared.runtime.lifecycle import (
    EXIT_FAILED,
    EXIT_NO_BROKER,
    EXIT_OK,
    EXIT_USAGE,
    run_service,
)
from shared.runtime.logging import configure_logging
from shared.runtime.settings import ServiceSettings, load, masked

S = TypeVar("S", bound=ServiceSettings)
CLOSE_GRACE_S = 15.0
"""Time after a drain for requeuing unfinished requests and closing connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports(Generic[S]):
    """Settings of a service, and its external dependencies: broker, clock and health."""

    settings: S
    open_broker: BrokerFactory
    clock: Clock
    health: Health


class Serve(Protocol[S]):
    """Function that creates and runs a service until *stop*, then drains it and returns."""

    async def __call__(self, ports: Ports[S], stop: asyncio.Event) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb(Generic[S]):
    """Verb of one service, in addition to the verbs of all services."""

    name: str
    help: str
    run: Callable[[S, argparse.Namespace], Coroutine[Any, Any, int]]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda _parser: None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineVerb:
    """Verb of one service that needs neither its settings nor a broker."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda _parser: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCli(Generic[S]):
    """Definition of one service's command line."""

    service: str
    description: str
    settings_type: type[S]
    serve: Serve[S]
    check: Callable[[S], None] = lambda _settings: None
    """
    Checks settings that fit the schema; raises `SettingsError` if the service cannot run with them.
    """
    verbs: Sequence[Verb[S]] = ()
    offline_verbs: Sequence[OfflineVerb] = ()
    run_options: Sequence[tuple[str, str]] = ()
    """Settings that `run` also takes as options: name and help text."""

    def main(self, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
        """
        Parse the arguments, run the verb and return the exit code.

        Args:
            argv: Arguments without the program's name; default: those of this process.
            prog: Program name in help texts; default: `headway-` and the service's name.
        """
        arguments = self._parser(prog).parse_args(argv)
        try:
            for offline in self.offline_verbs:
                if arguments.verb == offline.name:
                    return offline.run(arguments)
            settings = load(
                self.settings_type,
                service=self.service,
                environ=os.environ,
                file=arguments.config,
                overrides=dict(_assignment(text) for text in arguments.set)
                | self._option_values(arguments),
            )
            self.check(settings)
            return self._dispatch(settings, arguments)
        except SettingsError as error:
            print(f"headway-{self.service}: {error}", file=sys.stderr)
            return EXIT_USAGE
        except BrokerUnavailableError as error:
            print(f"headway-{self.service}: broker: {error}", file=sys.stderr)
            return EXIT_NO_BROKER
        except BrokenPipeError:  # the reader of the output has ended, e.g. `head`
            sys.stdout = None  # nothing is flushed at the exit
            return EXIT_OK
        except MeshError as error:
            print(f"headway-{self.service}: {error}", file=sys.stderr)
            return EXIT_FAILED

    def _option_values(self, arguments: argparse.Namespace) -> dict[str, str]:
        values = {name: getattr(arguments, name, None) for name, _ in self.run_options}
        return {name: value for name, value in values.items() if value is not None}

    def _dispatch(self, settings: S, arguments: argparse.Namespace) -> int:
        match arguments.verb:
            case "run":
                return self._run(settings)
            case "check-config":
                print_data(masked(settings), as_json=arguments.json)
                return EXIT_OK
            case "health":
                return _health(settings, as_json=arguments.json)
            case "topology":
                print_data(_topology(), as_json=arguments.json)
                return EXIT_OK
        configure_logging(level="warning", service=self.service)
        verb = next(verb for verb in self.verbs if verb.name == arguments.verb)
        return asyncio.run(verb.run(settings, arguments))

    def _run(self, settings: S) -> int:
        configure_logging(level=settings.log_level, service=self.service)

        async def main(stop: asyncio.Event) -> None:
            ports = Ports(
                settings=settings,
                open_broker=broker_factory(settings.amqp_url),
                clock=SystemClock(),
                health=Health(service=self.service),
            )
            async with serve_health(
                ports.health, host=settings.health_host, port=settings.health_port
            ):
                await self.serve(ports, stop)

        return run_service(self.service, main, limit_s=settings.drain_timeout_s + CLOSE_GRACE_S)

    def _parser(self, prog: str | None = None) -> argparse.ArgumentParser:
        common = common_options()
        parser = argparse.ArgumentParser(
            prog=prog or f"headway-{self.service}",
            description=self.description,
            epilog=f"Settings also come from HEADWAY_{self.service.upper()}_<FIELD> and "
            "HEADWAY_AMQP_URL. Exit codes: 0 ok, 1 failed, 2 usage or settings, "
            "3 broker unreachable.",
        )
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

        def add(name: str, text: str) -> argparse.ArgumentParser:
            return verbs.add_parser(
                name, help=text, description=text, parents=[common], formatter_class=HelpFormatter
            )

        for name, text in (
            ("run", "serve until SIGTERM, then drain"),
            ("check-config", "print the effective settings, secrets masked"),
            ("health", "check if the running service is ready"),
            ("topology", "print the exchanges and queues that the mesh uses"),
        ):
            parsed = add(name, text)
            if name == "run":
                for option, help_text in self.run_options:
                    parsed.add_argument(f"--{option}", metavar="VALUE", help=help_text)
        every: Sequence[Verb[S] | OfflineVerb] = (*self.verbs, *self.offline_verbs)
        for verb in every:
            verb.arguments(add(verb.name, verb.help))
        return parser


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


def _topology() -> dict[str, Any]:
    return {
        "exchanges": topology.EXCHANGES,
        "queues": (*topology.QUEUES, *topology.DELAY_QUEUES),
        "bindings": (*topology.BINDINGS, *topology.DELAY_BINDINGS),
    }


def _health(settings: ServiceSettings, *, as_json: bool) -> int:
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
    print_data(msgspec.json.decode(body), as_json=as_json)
    return EXIT_OK if ready else EXIT_FAILED
