"""
Pictures of the console's views in both themes, for the documentation.

`python -m ops.generate.console_pictures` starts a mesh with simulated engines under load, opens
each view in Chromium, and writes `ops/docs/console/VIEW-THEME.png`.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from ops.bench.meshes import MODEL, bench_mesh, bench_producer, simulated_agent
from ops.browser import Opened, console_cookies, opened
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.errors import MeshError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode
from shared.producer.producer import Producer
from shared.runtime.logging import configure_logging

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "console"
READY = {
    "overview": "tbody tr",
    "queues": "canvas",
    "instances": "td.good",
    "requests": "tbody tr",
    "letters": "tbody tr",
}
"""View -> element that it has once it is filled."""
CLASSES = {
    "chat": Slo(ttft_s=2.0, tbt_s=0.2),
    "reports": Slo(ttlt_s=120.0),
    "night-shift": Slo(),
}
"""Tenant -> targets of its requests."""
IN_PROGRESS = 30
"""Number of open requests of each tenant, more than the instances run."""
FILL_S = 20.0
TOKEN = "token-of-the-pictures"


async def main() -> int:
    """Make all pictures; return the exit code."""
    configure_logging(level="error", service="pictures")
    FOLDER.mkdir(exist_ok=True)
    agents = tuple(
        simulated_agent(f"gpu-{number}", SimulatedSettings(max_running=8)) for number in range(3)
    )
    gateway = {"console_token": TOKEN}
    async with bench_mesh("private", agents, gateway=gateway) as mesh, _loaded(mesh):
        url = mesh.spec.gateway_url
        cookies = await console_cookies(url, TOKEN)
        for theme in ("light", "dark"):
            async with opened(f"{url}/console/", dark=theme == "dark", cookies=cookies) as shown:
                await _taken(shown, theme)
    return 0


async def _taken(shown: Opened, theme: str) -> None:
    await asyncio.sleep(FILL_S)
    for view, selector in READY.items():
        await shown.page.evaluate("view => { location.hash = view }", view)
        await shown.page.locator(selector).first.wait_for()
        await asyncio.sleep(1.0)  # one more frame
        await shown.page.screenshot(path=FOLDER / f"{view}-{theme}.png")


@contextlib.asynccontextmanager
async def _loaded(mesh: ProcessMesh) -> AsyncIterator[None]:
    """Context in which requests of three classes are open, and one dead letter lies."""
    async with bench_producer(mesh) as producer, mesh.open_broker("headway-pictures") as broker:
        letter = OutMessage(
            body=b"{}",
            kind="request",
            message_id="report-0042",
            headers={topology.REASON_HEADER: "engine_error: the request ended 3 engines"},
        )
        await broker.publish(topology.DEAD, "", letter)
        loads = [
            asyncio.create_task(_ask(producer, tenant, slo))
            for tenant, slo in CLASSES.items()
            for _ in range(IN_PROGRESS)
        ]
        try:
            yield
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)


async def _ask(producer: Producer, tenant: str, slo: Slo) -> None:
    while True:
        request = InferenceRequest(
            model=MODEL,
            prompt="a question " * 20,
            max_tokens=100,
            ignore_eos=True,
            tenant=tenant,
            slo=slo,
        )
        await (await producer.submit(request, reply=ReplyMode.FINAL)).final()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except MeshError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
