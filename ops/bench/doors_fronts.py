"""
The doors of `ops.bench doors`: what a user can put in front of servers that run already.

A client can choose the server itself, or a process does it. Peers of the mesh are installed into an
environment of their own; without it their figures are null.

Of vllm-router 0.1.17, `kv_aware` is left out, since it needs the servers' KV events over ZeroMQ;
and program scheduling, since clients must describe their programs in a schema of the router, and
its cost model must be calibrated for the servers. Of smg 1.13.0, the policies `manual`, `bucket`
and `passthrough` are not for such servers. Both pass `priority` on to the server. LiteLLM does not:
its own `priority` orders requests before a rate limit. Both routers serve one model with the
options used here, so there is one router for each model.
"""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ops.bench.doors_traffic import RequestClass, Session

OURS = "headway"
ROOT = Path(__file__).resolve().parents[2]
PEERS = ("vllm-router==0.1.17", "smg==1.13.0", "litellm[proxy]==1.108.7")


def peer_python() -> Path:
    """Python of the environment with the peers: HEADWAY_DOORS_PYTHON, or `.headway/doors`."""
    given = os.environ.get("HEADWAY_DOORS_PYTHON")
    return Path(given) if given else ROOT / ".headway/doors/bin/python"


def install_command() -> str:
    """Shell command that installs the peers."""
    environment = peer_python().parent.parent
    packages = " ".join(f"'{each}'" for each in PEERS)
    return (
        f"{sys.executable} -m venv {environment} && "
        f"{environment}/bin/python -m pip install {packages}"
    )


Servers = Sequence[tuple[str, str]]
"""Model and URL of each server."""


class Choice(Protocol):
    """Chooses the address for each request."""

    def begin(self, model: str) -> str:
        """Address for a request that begins."""
        ...

    def end(self, url: str) -> None:
        """Record the end of a request at this address."""
        ...


@dataclass(slots=True)
class Fixed:
    """One address for each model."""

    urls: Mapping[str, str]

    def begin(self, model: str) -> str:
        return self.urls[model]

    def end(self, url: str) -> None:
        pass


@dataclass(slots=True)
class InTurn:
    """Every server of the model in turn."""

    servers: Servers
    _turns: "Counter[str]" = field(default_factory=Counter)

    def begin(self, model: str) -> str:
        urls = [url for served, url in self.servers if served == model]
        self._turns[model] += 1
        return urls[self._turns[model] % len(urls)]

    def end(self, url: str) -> None:
        pass


@dataclass(slots=True)
class LeastLoaded:
    """The server of the model with the fewest open requests of this client, else in turn."""

    servers: Servers
    _turns: "itertools.count[int]" = field(default_factory=itertools.count)
    _open: "Counter[str]" = field(default_factory=Counter)

    def begin(self, model: str) -> str:
        urls = [url for served, url in self.servers if served == model]
        turn = next(self._turns)
        in_turn = [urls[(turn + number) % len(urls)] for number in range(len(urls))]
        url = min(in_turn, key=lambda each: self._open[each])
        self._open[url] += 1
        return url

    def end(self, url: str) -> None:
        self._open[url] -= 1


@dataclass(frozen=True, slots=True)
class Command:
    """How a door's process is started."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """What the command of a door is made from."""

    servers: Servers
    port: int
    further_port: int
    """Port of the door's own metrics."""
    broker: str | None
    directory: Path
    """Empty folder, in which the process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One way to the servers."""

    name: str
    choose: Callable[[Servers], Choice] | None = None
    """The client's own choice; None for a door with a process."""
    command: Callable[[Start], Command] | None = None
    program: Path | None = None
    """Program that must be installed; None for a door that needs none."""
    gives_priority: bool = False
    """True if requests carry the priority of their class."""
    gives_slo: bool = False
    """True if requests carry their targets, and nothing else."""
    session_headers: tuple[str, ...] = ()
    """Headers in which the door reads the name of a session."""
    needs_sessions: bool = False
    is_per_model: bool = True
    """True if each model needs a process of its own."""

    @property
    def is_installed(self) -> bool:
        return self.program is None or self.program.exists()

    def fields(self, request_class: RequestClass) -> dict[str, Any]:
        """Fields of a body for this door."""
        fields: dict[str, Any] = {}
        if self.gives_priority:
            fields["priority"] = request_class.priority
        if self.gives_slo:
            targets = msgspec.to_builtins(request_class.slo)
            fields["slo"] = {name: value for name, value in targets.items() if value is not None}
        return fields

    def headers(self, session: Session) -> dict[str, str]:
        """Headers of a request for this door."""
        return {} if session.key is None else dict.fromkeys(self.session_headers, session.key)


def _client(name: str, choose: Callable[[Servers], Choice], *, gives_priority: bool) -> Door:
    full_name = f"{name}, priority" if gives_priority else name
    return Door(name=full_name, choose=choose, gives_priority=gives_priority)


def _urls(start: Start) -> list[str]:
    return [url for _, url in start.servers]


def _vllm_router(
    policy: str, *, gives_priority: bool = False, needs_sessions: bool = False
) -> Door:
    program = peer_python().parent / "vllm-router"

    def command(start: Start) -> Command:
        return Command(
            (
                *(str(program), "--host", "127.0.0.1", "--port", str(start.port)),
                *("--worker-urls", *_urls(start), "--policy", policy),
                *("--prometheus-port", str(start.further_port)),
            )
        )

    return Door(
        name=f"vllm-router {policy}{', priority' if gives_priority else ''}",
        command=command,
        program=program,
        gives_priority=gives_priority,
        session_headers=("x-session-id",),
        needs_sessions=needs_sessions,
    )


def _smg(policy: str, *, gives_priority: bool = False, needs_sessions: bool = False) -> Door:
    program = peer_python().parent / "smg"

    def command(start: Start) -> Command:
        return Command(
            (
                *(str(program), "launch", "--host", "127.0.0.1", "--port", str(start.port)),
                *("--worker-urls", *_urls(start), "--policy", policy),
                *("--prometheus-port", str(start.further_port), "--disable-tokenizer-autoload"),
            )
        )

    return Door(
        name=f"smg {policy}{', priority' if gives_priority else ''}",
        command=command,
        program=program,
        gives_priority=gives_priority,
        session_headers=("x-smg-routing-key",),
        needs_sessions=needs_sessions,
    )


def _litellm() -> Door:
    program = peer_python().parent / "litellm"

    def command(start: Start) -> Command:
        servers = [
            {
                "model_name": model,
                "litellm_params": {
                    "model": f"hosted_vllm/{model}",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for model, url in start.servers
        ]
        config = {"model_list": servers, "router_settings": {"routing_strategy": "least-busy"}}
        path = start.directory / "litellm.yaml"  # JSON is YAML
        path.write_bytes(msgspec.json.encode(config))
        return Command(
            (str(program), "--host", "127.0.0.1", "--port", str(start.port), "--config", str(path)),
            {
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            },
        )

    return Door(name="litellm least-busy", command=command, program=program, is_per_model=False)


def _headway() -> Door:
    def command(start: Start) -> Command:
        attach = [part for model, url in start.servers for part in ("--attach", f"{model}={url}")]
        broker = ("--broker", start.broker) if start.broker else ()
        program = Path(sys.executable).parent / "headway"
        return Command((str(program), "up", "--port", str(start.port), *broker, *attach))

    return Door(name=OURS, command=command, gives_slo=True, is_per_model=False)


DOORS: Mapping[str, Door] = {
    door.name: door
    for door in (
        _client("round robin", InTurn, gives_priority=False),
        _client("round robin", InTurn, gives_priority=True),
        _client("least loaded", LeastLoaded, gives_priority=True),
        _vllm_router("round_robin"),
        _vllm_router("cache_aware"),
        _vllm_router("cache_aware", gives_priority=True),
        _vllm_router("power_of_two"),
        _vllm_router("power_of_two", gives_priority=True),
        _vllm_router("consistent_hash", needs_sessions=True),
        _vllm_router("sticky_least_loaded", needs_sessions=True),
        _smg("cache_aware"),
        _smg("cache_aware", gives_priority=True),
        _smg("least_load", gives_priority=True),
        _smg("consistent_hashing", needs_sessions=True),
        _litellm(),
        _headway(),
    )
}
