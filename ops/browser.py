"""A headless Chromium of this machine, for tests, benchmarks and pictures of pages."""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
from playwright.async_api import ConsoleMessage, Page, Request, ViewportSize, async_playwright

from shared.contracts.errors import SettingsError

PROGRAM = "chromium"
_SIZE = ViewportSize(width=1280, height=900)


@dataclass  # without slots: playwright adds an attribute for each listener
class Opened:
    """A page, and what went wrong in it."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """Errors in the browser's console, and exceptions."""
    hosts: set[str] = field(default_factory=set)
    """Hosts of all requests, with their ports."""

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)


@asynccontextmanager
async def opened(
    url: str, *, dark: bool = False, cookies: Mapping[str, str] | None = None
) -> AsyncIterator[Opened]:
    """
    Context with a page of a new browser, which shows *url*.

    Args:
        url: Address of the page.
        dark: True if the system's theme is dark.
        cookies: Cookies that the browser has for the page's host, by name.

    Raises:
        SettingsError: Chromium is not installed.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise SettingsError(
            "chromium is not installed; on Debian and its derivatives: apt-get install chromium"
        )
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            context = await browser.new_context(
                viewport=_SIZE, color_scheme="dark" if dark else "light"
            )
            for name, value in (cookies or {}).items():
                await context.add_cookies([{"name": name, "value": value, "url": url}])
            page = await context.new_page()
            found = Opened(page)
            await page.goto(url)
            yield found
        finally:
            await browser.close()


async def console_cookies(gateway_url: str, token: str) -> dict[str, str]:
    """The cookies of a browser that has opened the link to a console, which works once."""
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{gateway_url}/console", params={"token": token})
    return dict(response.cookies)
