"""Waits until every service of a mesh is ready, and prints what is missing meanwhile."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable

import msgspec

from services.mesh.spec import AgentSpec, MeshSpec
from shared.broker import topology
from shared.broker.declaring import declare_topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder, Seconds
from shared.contracts.errors import MeshError
from shared.contracts.telemetry import InstanceStatus, LanesObserved

_decode: Decoder[InstanceStatus | LanesObserved] = Decoder(InstanceStatus | LanesObserved)
POLL_S: Seconds = 0.1
FIRST_LINES_S: Seconds = 5.0
"""Time after which what is missing is printed for the first time; most meshes are ready by then."""
LINES_PERIOD_S: Seconds = 30.0
"""Longest time between further lines; at first, they come when the time has doubled."""


class _Readiness(msgspec.Struct, frozen=True):
    """Part of a gateway's answer to /ready."""

    reasons: dict[str, str] = {}


Say = Callable[[str], None]
"""Prints one line."""


def silent(_line: str) -> None:
    """Print nothing."""


async def wait_ready(
    broker: Broker,
    spec: MeshSpec,
    *,
    timeout_s: float,
    check: Callable[[], Awaitable[None]],
    say: Say = silent,
) -> None:
    """
    Wait until all agents have loaded their first model, groupers report and gateways are ready.

    Args:
        broker: A client of the mesh's broker.
        spec: Specification of the mesh.
        timeout_s: Time limit.
        check: Raises an error if a service has ended.
        say: Prints one line about what is missing, for example `agent-0: loading tiny-llama, 38 s`.

    Raises:
        MeshError: The mesh is not ready in time; the message says what is missing.
    """
    start = _Start(spec)
    now = asyncio.get_running_loop().time
    begun_at, lines_at = now(), now() + FIRST_LINES_S
    await declare_topology(broker)
    queue = topology.temporary_queue("ready")
    bindings = [(topology.TELEMETRY, key) for key in (topology.STATUS_KEYS, topology.LANES_KEY)]
    async with listening(broker, queue, _decode, bindings, start.on_state):
        while missing := await start.missing():
            await check()
            waited_s = now() - begun_at
            if waited_s >= timeout_s:
                raise MeshError(
                    f"the mesh is not ready after {timeout_s:g} s: {'; '.join(missing)}; logs are "
                    f"in {spec.log_dir}"
                )
            if now() >= lines_at:
                lines_at += min(waited_s, LINES_PERIOD_S)
                for line in missing:
                    say(f"{line}, {waited_s:.0f} s")
            await asyncio.sleep(POLL_S)


class _Start:
    """What the services of a mesh have reported since its start."""

    def __init__(self, spec: MeshSpec) -> None:
        self._spec = spec
        self._agents: set[str] = set()
        self._groupers: set[str] = set()

    def on_state(self, message: InstanceStatus | LanesObserved) -> None:
        """Record that a service works: groupers report then, agents also before."""
        if isinstance(message, LanesObserved):
            self._groupers.add(message.sender)
        elif not message.is_loading_first:
            self._agents.add(message.instance_id)

    async def missing(self) -> list[str]:
        """
        What is not ready; empty if the mesh is. The gateways, which wait for models, are asked when
        the others have reported.
        """
        loading = [_loading(each) for each in self._spec.agents if not self._reports(each)]
        if (present := len(self._groupers)) < self._spec.groupers:
            loading.append(f"groupers: {present} of {self._spec.groupers} report")
        return loading or await asyncio.to_thread(self._gateways)

    def _reports(self, agent: AgentSpec) -> bool:
        """
        True if an agent has an instance that has reported; ids of attached servers begin with its
        id.
        """
        own = agent.instance_id
        return any(each == own or each.startswith(f"{own}-") for each in self._agents)

    def _gateways(self) -> list[str]:
        found = ((url, _reason(url)) for url in self._spec.gateway_urls)
        return [f"gateway {url}: {reason}" for url, reason in found if reason]


def _loading(agent: AgentSpec) -> str:
    """What an agent does that serves nothing yet."""
    model = agent.settings.get("initial_model")
    if agent.engine == "remote":
        url = agent.settings["engine"]["remote"]["url"]
        return f"{agent.instance_id}: waiting for an answer of {url}"
    return f"{agent.instance_id}: " + ("starting" if model is None else f"loading {model}")


def _reason(gateway: str) -> str:
    """Why a gateway is not ready; empty if it is."""
    try:
        with urllib.request.urlopen(f"{gateway}/ready", timeout=2):  # noqa: S310 - our own http URL
            return ""
    except urllib.error.HTTPError as error:
        return "; ".join(_reasons(error.read())) or f"status {error.code}"
    except OSError:
        return "starting"


def _reasons(body: bytes) -> list[str]:
    try:
        return [*msgspec.json.decode(body, type=_Readiness).reasons.values()]
    except msgspec.DecodeError:
        return []
