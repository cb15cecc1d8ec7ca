"""axe-core from the npm registry: it finds what keeps people from using a page."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.async_api import Page, ViewportSize

from tests.requirements import program

PACKAGE = "axe-core@4.14.1"
GRAVE = ("serious", "critical")
SIZES = (ViewportSize(width=1280, height=900), ViewportSize(width=480, height=900))
_RUN = """
async () => {
  const found = await axe.run(document, { preload: false });
  return found.violations.map(({ id, impact, nodes }) => (
    { id, impact, places: nodes.map(({ html, failureSummary }) => html + " " + failureSummary) }
  ));
}
"""


@dataclass(frozen=True, slots=True)
class Axe:
    """The program, which runs in a page."""

    source: str

    async def grave_in(self, page: Page) -> list[str]:
        """Serious and critical violations of the rules in what *page* shows, wide and narrow."""
        await page.evaluate(self.source)
        found: list[str] = []
        for size in SIZES:
            await page.set_viewport_size(size)
            found += await self._found_in(page)
        await page.set_viewport_size(SIZES[0])
        return found

    async def _found_in(self, page: Page) -> list[str]:
        violations: list[dict[str, Any]] = await page.evaluate(_RUN)
        return [
            f"{each['id']} ({each['impact']}): {place}"
            for each in violations
            if each["impact"] in GRAVE
            for place in each["places"]
        ]


def installed_axe(folder: Path) -> Axe:
    """Install axe-core into *folder*."""
    npm = program("npm", "npm")
    (folder / "package.json").write_text('{"private": true}\n')
    options = ("--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")
    subprocess.run((npm, "install", *options, PACKAGE), cwd=folder, check=True)
    return Axe((folder / "node_modules" / "axe-core" / "axe.min.js").read_text())
