"""Starts of the engine host for servers of others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise

import pytest

from services.agent.backends.remote import token_host
from services.agent.backends.remote.server import Server
from services.agent.backends.remote.token_host import RESTART_PERIOD_S, TokenHost
from services.agent.backends.settings import RemoteSettings, VllmSettings
from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from tests.brokers import eventually

pytestmark = pytest.mark.virtual_time

ENTRY = ModelEntry(
    name=ModelName("m"), path="/models/m", architecture="LlamaForCausalLM", max_model_len=64
)
START_S = 1.0
"""Time from the launch of a host until it is ready, or has ended."""


class Host:
    """A host process, as `HostLink` shows it."""

    pid = 1

    def __init__(self, *, starts: bool, on_lost: Callable[[str], None]) -> None:
        self.has_ended = False
        self.launched_at = asyncio.get_running_loop().time()
        self._starts = starts
        self._on_lost = on_lost

    async def ready(self) -> None:
        await asyncio.sleep(START_S)
        if not self._starts:
            self.die()
            raise EngineError("the engine host ended with status 1 before it was ready")

    def die(self) -> None:
        self.has_ended = True
        self._on_lost("the engine host ended with status 1")

    def send(self, _command: object) -> None:
        """Nothing is run."""

    async def ask(self, _command: object, _timeout_s: float) -> None:
        """Each server is attached at once."""

    async def close(self) -> None:
        self.has_ended = True


class Hosts:
    """All hosts that were launched."""

    def __init__(self) -> None:
        self.all: list[Host] = []
        self.starts = True
        """False: new hosts end while they are started."""

    async def launch(
        self, _settings: object, *, on_lost: Callable[[str], None], **_: object
    ) -> Host:
        self.all.append(Host(starts=self.starts, on_lost=on_lost))
        return self.all[-1]

    @property
    def num_alive(self) -> int:
        return sum(not each.has_ended for each in self.all)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    async def no(_server: Server, _model: str) -> bool:
        return False

    made = Hosts()
    monkeypatch.setattr(token_host, "HostLink", made)
    monkeypatch.setattr(Server, "generates", no)
    monkeypatch.setattr(Server, "orders", no)
    return made


@pytest.fixture
async def host(hosts: Hosts) -> AsyncIterator[TokenHost]:
    """A host with one server."""
    made = TokenHost(VllmSettings(python="python"))
    await attach(made, "http://a:1")
    assert hosts.num_alive == 1
    yield made
    await made.close()


async def attach(host: TokenHost, url: str) -> None:
    await host.attach(ENTRY, RemoteSettings(url=url), "m")


async def test_host_that_ends_while_it_starts_is_started_again_after_a_pause(
    hosts: Hosts, host: TokenHost
) -> None:
    hosts.starts = False
    hosts.all[0].die()
    await asyncio.sleep(4 * (START_S + RESTART_PERIOD_S) - 0.1)
    hosts.starts = True
    await eventually(lambda: host.pid is not None)
    await asyncio.sleep(10 * RESTART_PERIOD_S)

    launches = [each.launched_at for each in hosts.all[1:]]
    pauses = [later - earlier for earlier, later in pairwise(launches)]
    assert pauses == pytest.approx([START_S + RESTART_PERIOD_S] * 4)
    assert hosts.num_alive == 1


async def test_server_that_is_attached_during_the_pause_needs_no_second_host(
    hosts: Hosts, host: TokenHost
) -> None:
    hosts.starts = False
    hosts.all[0].die()
    await asyncio.sleep(START_S + 0.1)
    assert hosts.num_alive == 0
    hosts.starts = True
    await attach(host, "http://b:1")
    await asyncio.sleep(10 * RESTART_PERIOD_S)

    assert (len(hosts.all), hosts.num_alive) == (3, 1)


async def test_failed_first_start_is_an_error_of_the_server_and_starts_nothing(
    hosts: Hosts,
) -> None:
    """The instance attaches its server again later."""
    hosts.starts = False
    host = TokenHost(VllmSettings(python="python"))
    with pytest.raises(EngineError, match="ended with status 1"):
        await attach(host, "http://a:1")
    await asyncio.sleep(10 * RESTART_PERIOD_S)
    assert len(hosts.all) == 1
    await host.close()
