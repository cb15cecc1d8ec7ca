"""Commands and files in the pages of the guides."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

GUIDES = Path(__file__).resolve().parents[3] / "ops" / "docs" / "guides"
NAMES = sorted({path.stem for path in GUIDES.glob("*.md")} - {"README"})
"""Names of all guides."""
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=(?P<file>\S+))?\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code of a page."""

    language: str
    file: str | None
    """Name of the file that the reader writes; None: the block is not a file."""
    text: str
    before: str
    """The paragraph before the block."""


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page, without the indent of the list that they are in."""
    for found in _BLOCK.finditer(page):
        lines = [line.removeprefix(found["indent"]) for line in found["text"].splitlines()]
        before = page[: found.start()].rstrip().rpartition("\n\n")[2]
        yield Block(found["language"], found["file"], "\n".join(lines) + "\n", before)


def page_of(name: str) -> str:
    """The text of the guide *name*."""
    return (GUIDES / f"{name}.md").read_text()


def write_files(page: str, folder: Path) -> None:
    """Write the files of a page into *folder*."""
    for block in blocks_of(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


def commands_of(page: str) -> str:
    """All commands of a page, as one script."""
    return "".join(
        block.text for block in blocks_of(page) if block.language == "sh" and block.file is None
    )


def module_of(guide: str, name: str) -> ModuleType:
    """The module *name* that a guide has the reader write, imported from its page."""
    file = f"{name}.py"
    (text,) = (block.text for block in blocks_of(page_of(guide)) if block.file == file)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, f"{guide}.md", "exec"), module.__dict__)
    return module
