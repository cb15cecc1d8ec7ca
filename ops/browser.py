"""A headless Chromium of this machine, for tests, benchmarks and pictures of pages."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

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
async def opened(url: str, *, dark: bool = False) -> AsyncIterator[Opened]:
    """
    Context with a page of a new browser, which shows *url*.

    Args:
        url: Address of the page.
        dark: True if the system's theme is dark.

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
            page = await browser.new_page(viewport=_SIZE, color_scheme="dark" if dark else "light")
            found = Opened(page)
            await page.goto(url)
            yield found
        finally:
            await browser.close()
