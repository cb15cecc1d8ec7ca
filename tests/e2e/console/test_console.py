"""The console in a real browser, in front of a real mesh under load."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from playwright.async_api import Page

from ops.browser import PROGRAM, Opened, console_cookies, opened
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode
from shared.producer.producer import Producer
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.console.axe import Axe, installed_axe
from tests.e2e.meshes import LLAMA, mesh_spec, producer_of
from tests.requirements import program

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b>tenant</b>"
SLOS = (Slo(ttft_s=2.0, tbt_s=0.5), Slo(ttlt_s=60.0), Slo())
IN_PROGRESS = 64
"""More than the instances hold, so that requests always wait in lanes and plans have groups."""
SHOWN_MS = 20_000
TOKEN = "token-of-this-test"
VIEWS = {
    "Overview": "tbody tr",
    "Virtual queues": "canvas",
    "Instances": "tbody tr",
    "Requests": "code",
    "Dead letters": "tbody tr",
}
"""View -> what it shows once it is filled."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy_mesh(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessMesh]:
    """A mesh that always has requests, of a tenant whose name is markup."""
    program(PROGRAM, "chromium")
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        engine = {"engine": {"simulated": {"max_running": 4}}}
        spec = mesh_spec(
            url,
            tmp_path_factory.mktemp("mesh"),
            agent_settings=engine,
            gateway={"console_token": TOKEN},
        )
        async with ProcessMesh(spec) as mesh, producer_of(mesh) as producer:
            loads = [asyncio.create_task(_load(producer, n)) for n in range(IN_PROGRESS)]
            yield mesh
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cookies(busy_mesh: ProcessMesh) -> dict[str, str]:
    """Cookies of a browser that has opened the console's link."""
    return await console_cookies(busy_mesh.spec.gateway_url, TOKEN)


async def _load(producer: Producer, number: int) -> None:
    while True:
        request = InferenceRequest(
            model=LLAMA, prompt="hello", max_tokens=400, ignore_eos=True, temperature=0.0,
            tenant=HOSTILE, slo=SLOS[number % len(SLOS)],
        )  # fmt: skip
        await (await producer.submit(request, reply=ReplyMode.FINAL)).final()


def url_of(mesh: ProcessMesh, view: str = "overview") -> str:
    return f"{mesh.spec.gateway_url}/console/#{view}"


async def dead_letter(mesh: ProcessMesh, name: str, reason: str) -> None:
    """Publish a dead letter."""
    async with mesh.open_broker("headway-test") as broker:
        headers = {topology.REASON_HEADER: reason}
        letter = OutMessage(body=b"{}", kind="k", message_id=name, headers=headers)
        await broker.publish(topology.DEAD, "", letter)


async def ended_request(mesh: ProcessMesh) -> str:
    """Id of a request that has ended."""
    request = InferenceRequest(model=LLAMA, prompt="hello", max_tokens=4, slo=Slo(ttft_s=5.0))
    async with producer_of(mesh) as producer:
        generation = await producer.submit(request, reply=ReplyMode.FINAL)
        await generation.final()
    return str(generation.request_id)


def assert_clean(shown: Opened, mesh: ProcessMesh) -> None:
    """No error, and no request to another host."""
    assert shown.problems == []
    assert shown.hosts == {mesh.spec.gateway_url.removeprefix("http://")}


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_view_is_filled(
    busy_mesh: ProcessMesh, cookies: dict[str, str], theme: str
) -> None:
    async with opened(url_of(busy_mesh), dark=theme == "dark", cookies=cookies) as shown:
        page = shown.page
        await page.locator("tbody tr").first.wait_for(timeout=SHOWN_MS)
        assert "interactive" in await page.locator("tbody").inner_text()

        await page.get_by_role("link", name="Virtual queues").click()
        await page.get_by_text("Epoch").wait_for(timeout=SHOWN_MS)
        await page.locator("canvas").wait_for(timeout=SHOWN_MS)

        await page.get_by_role("link", name="Instances").click()
        await page.locator("tbody tr", has_text="serving").first.wait_for(timeout=SHOWN_MS)
        assert await page.locator("tbody").first.locator("tr").count() == 2

        await page.get_by_role("link", name="Requests").click()
        await page.get_by_text("headway requests --late").wait_for(timeout=SHOWN_MS)

        await page.get_by_role("link", name="Dead letters").click()
        await page.get_by_text("headway dead-letter peek").wait_for(timeout=SHOWN_MS)
        assert_clean(shown, busy_mesh)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Axe:
    return installed_axe(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_view_is_accessible(
    busy_mesh: ProcessMesh, cookies: dict[str, str], axe: Axe, theme: str
) -> None:
    """No rule that matters is violated, also while there is a dead letter, and in a life."""
    await dead_letter(busy_mesh, "m", "unknown_model")
    request_id = await ended_request(busy_mesh)
    async with opened(url_of(busy_mesh), dark=theme == "dark", cookies=cookies) as shown:
        page = shown.page
        for link, filled in VIEWS.items():
            await page.get_by_role("link", name=link).click()
            await page.locator(filled).first.wait_for(timeout=SHOWN_MS)

            assert await axe.grave_in(page) == [], link
        await page.get_by_role("link", name="Requests").click()
        await open_life(page, request_id)

        assert await axe.grave_in(page) == []


async def test_the_check_of_accessibility_finds_a_violation(
    busy_mesh: ProcessMesh, cookies: dict[str, str], axe: Axe
) -> None:
    async with opened(url_of(busy_mesh), cookies=cookies) as shown:
        page = shown.page
        await page.locator("tbody tr").first.wait_for(timeout=SHOWN_MS)
        await page.evaluate("document.body.append(document.createElement('button'))")

        assert "button-name (critical)" in " ".join(await axe.grave_in(page))


async def open_life(page: Page, request_id: str) -> None:
    """Open the life of a request, as soon as the mesh has its record."""
    await page.get_by_label("Id of a request").fill(request_id)

    async def is_shown() -> bool:
        await page.get_by_role("button", name="Show").click()
        return await page.locator("meter").count() > 0

    await eventually(is_shown)


async def test_names_of_tenants_and_errors_are_text(
    busy_mesh: ProcessMesh, cookies: dict[str, str]
) -> None:
    await dead_letter(busy_mesh, HOSTILE, HOSTILE)
    async with opened(url_of(busy_mesh), cookies=cookies) as shown:
        page = shown.page
        await page.get_by_text(HOSTILE).first.wait_for(timeout=SHOWN_MS)
        await page.get_by_role("link", name="Dead letters").click()
        await page.locator("td", has_text="onerror").first.wait_for(timeout=SHOWN_MS)

        assert await page.title() == "Headway console"
        assert await page.locator("main img, main b").count() == 0
        assert_clean(shown, busy_mesh)


async def test_a_filter_selects_groups(busy_mesh: ProcessMesh, cookies: dict[str, str]) -> None:
    async with opened(url_of(busy_mesh, "queues"), cookies=cookies) as shown:
        page = shown.page
        rows = page.locator("tbody tr")
        group = await rows.locator("td").first.inner_text(timeout=SHOWN_MS)
        lane = group.rpartition("/")[0]
        other = rows.filter(has_not_text=lane)
        await other.first.wait_for(timeout=SHOWN_MS)
        await page.get_by_label("Filter").fill(lane)
        await other.first.wait_for(state="detached", timeout=SHOWN_MS)
        await rows.filter(has_text=lane).first.wait_for(timeout=SHOWN_MS)
        await page.get_by_label("Filter").fill("no such lane")
        await page.get_by_text("Nothing waits.").wait_for(timeout=SHOWN_MS)
        assert_clean(shown, busy_mesh)


async def test_the_page_follows_a_gateway_that_is_started_again(
    busy_mesh: ProcessMesh, cookies: dict[str, str]
) -> None:
    async with opened(url_of(busy_mesh, "instances"), cookies=cookies) as shown:
        page = shown.page
        await page.locator("tbody tr").first.wait_for(timeout=SHOWN_MS)
        await busy_mesh.kill("gateway")
        await page.get_by_role("alert").wait_for(timeout=SHOWN_MS)
        await busy_mesh.processes["gateway"].start()
        await page.get_by_role("alert").wait_for(state="detached", timeout=60_000)
        await page.locator("tbody tr", has_text="serving").first.wait_for(timeout=SHOWN_MS)
