"""The engine host that sends requests to servers of others in tokens."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.agent.backends.base import EngineRequest, NewOutput, RunEnded
from services.agent.backends.remote.server import Server
from services.agent.backends.settings import RemoteSettings, VllmSettings
from services.agent.backends.vllm.front.arguments import engine_arguments
from services.agent.backends.vllm.front.link import HostLink
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from services.agent.backends.vllm.front.run_events import events_of
from services.agent.backends.vllm.shared.wire import (
    Abort,
    Attach,
    Detach,
    HostEvent,
    Models,
    Submit,
)
from shared.contracts.base import RequestId, Seconds
from shared.contracts.errors import EngineError, MeshError, NotActiveError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Tokens

log = structlog.get_logger()
RESTART_PERIOD_S: Seconds = 5.0
WITHOUT_DEVICE = {"VLLM_TARGET_DEVICE": "cpu"}
"""Variables with which vLLM looks for no GPU."""
Report = Callable[[Sequence[NewOutput | RunEnded]], None]


@dataclass(frozen=True, slots=True)
class _Attached:
    entry: ModelEntry
    command: Attach


class TokenHost:
    """
    An engine host without engines, which all instances of an agent share.

    It has vLLM, which reads bodies. A host that has ended is started again; its requests may run on
    another instance meanwhile.

    Args:
        settings: Interpreter, log and time limits of the host.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._scratch = Path(tempfile.mkdtemp(prefix="headway-host-"))
        self._lock = asyncio.Lock()
        """Held while the host is started and while servers are attached."""
        self._link: HostLink | None = None
        self._attached: dict[str, _Attached] = {}
        self._runs: dict[RequestId, Report] = {}
        self._restarting: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the host; None while it is started."""
        return None if self._link is None else self._link.pid

    async def attach(self, entry: ModelEntry, remote: RemoteSettings, served: str) -> None:
        """
        Use a server.

        Args:
            entry: The server's model.
            remote: The server.
            served: Name of the model at the server.

        Raises:
            EngineError: The host cannot be started, vLLM does not know the model, or the server
                does not answer.
        """
        server = Server(remote)
        try:
            command = Attach(
                model=entry.name,
                engine_args=self._arguments(entry),
                remote=remote,
                served=served,
                generates=await server.generates(served),
                orders=await server.orders(served),
            )
        finally:
            await server.close()
        async with self._lock:
            attached = self._attached[remote.url] = _Attached(entry, command)
            if self._link is None:
                await self._launch()
            else:
                await self._use(self._link, attached)

    def detach(self, url: str) -> None:
        """Forget a server."""
        self._attached.pop(url, None)
        if self._link is not None:
            self._link.send(Detach(url))

    def submit(
        self, request: EngineRequest, *, url: str, stops: Tokens, adapter: str, report: Report
    ) -> None:
        """
        Run a request at a server.

        Args:
            request: The run.
            url: Address of the server, which is attached.
            stops: Tokens that end the answer, unless the request is a call.
            adapter: Directory of the request's adapter; empty if only the server has it.
            report: Receives the run's outputs and its end.

        Raises:
            NotActiveError: The host is being started again.
        """
        if self._link is None:
            raise NotActiveError("the engine host is being started again")
        self._runs[request.request_id] = report
        self._link.send(Submit(request, stops, adapter, url))

    def abort(self, request_id: RequestId) -> None:
        """End a run, about which nothing more is reported; other runs are ignored."""
        if self._runs.pop(request_id, None) is not None and self._link is not None:
            self._link.send(Abort(request_id))

    async def close(self) -> None:
        """End the host."""
        self._is_closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait({self._restarting})
        async with self._lock:
            link, self._link = self._link, None
        if link is not None:
            await link.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _arguments(self, entry: ModelEntry) -> dict[str, object]:
        """Arguments whose configuration has the limits of the model, and nothing of an engine's."""
        arguments = engine_arguments(
            entry,
            VllmSettings(policy="stock", host_kv_bytes=0, safepoint_layers=0, eager=True),
            is_cpu=True,
            stats_path=self._scratch / "stats",
        )
        return {name: value for name, value in arguments.items() if name != "additional_config"}

    async def _launch(self) -> None:
        """
        Start the host and attach all servers. The caller holds the lock, and no host runs.

        Raises:
            EngineError: The host cannot be started.
        """
        if (reason := vllm_unavailable_reason()) and self._settings.python is None:
            raise EngineError(reason)
        link = await HostLink.launch(
            self._settings,
            architectures=(),
            scratch=self._scratch,
            on_event=self._on_event,
            on_lost=self._on_lost,
            variables=WITHOUT_DEVICE,
        )
        try:
            await self._use_all(link)
        except BaseException:  # also when cancelled: the host must not remain
            await link.close()
            raise
        self._link = link

    async def _use_all(self, link: HostLink) -> None:
        """
        Wait for a new host, and attach all servers.

        Raises:
            EngineError: The host has ended, or a server cannot be attached.
        """
        await link.ready()
        for attached in tuple(self._attached.values()):
            await self._use(link, attached)
        if link.has_ended:
            raise EngineError("the engine host ended while servers were attached")

    async def _use(self, link: HostLink, attached: _Attached) -> None:
        link.send(Models((attached.entry,)))
        try:
            await link.ask(attached.command, self._settings.start_timeout_s)
        except TimeoutError:
            raise EngineError(
                f"the engine host did not read {attached.entry.name} in time"
            ) from None

    def _on_event(self, event: HostEvent) -> None:
        reports: dict[Report, list[NewOutput | RunEnded]] = {}
        for each in events_of(event):
            report = self._runs.get(each.request_id)
            if report is None:
                continue
            if isinstance(each, RunEnded) or each.output.is_last:
                del self._runs[each.request_id]
            reports.setdefault(report, []).append(each)
        for report, events in reports.items():
            report(events)

    def _on_lost(self, message: str) -> None:
        """
        Move the runs of a host that has ended, and start another one. The end of a host that is
        still being started is an error of `_launch`, whose caller tries again.
        """
        log.error("host.ended", reason=message)
        if self._link is None:
            return
        self._link = None
        runs, self._runs = self._runs, {}
        for request_id, report in runs.items():
            report([RunEnded(request_id, NotActiveError(message))])
        if not self._is_closed:
            self._restarting = asyncio.create_task(self._restart(), name="restart the engine host")

    async def _restart(self) -> None:
        while True:
            try:
                async with self._lock:
                    if self._link is None:  # otherwise a server was attached meanwhile
                        await self._launch()
            except MeshError as error:
                log.error("host.failed", reason=str(error))
                await asyncio.sleep(RESTART_PERIOD_S)
            else:
                return
