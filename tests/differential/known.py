"""Known differences from `vllm serve`: the table in `ops/docs/http.md`."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.differential.cells import Asked

DOCUMENT = Path(__file__).parents[2] / "ops" / "docs" / "http.md"
HEADER = "| endpoint | field of the body or of the answer | difference |"
_ROW = re.compile(r"\| (?:`(?P<endpoint>[^`]+)`|all) \| `(?P<field>[^`]+)` \| .+ \|")


@dataclass(frozen=True, slots=True)
class Known:
    """A row of the table."""

    endpoint: str | None
    """None: every endpoint."""
    field: str
    """Field of the body, as the name of its cell, or field of the answer."""

    def covers(self, asked: Asked, difference: str) -> bool:
        """Return whether this row describes *difference*."""
        is_endpoint = self.endpoint in (None, asked.cell.endpoint)
        place = difference.partition(" is ")[0]
        return is_endpoint and (self.field == asked.cell.field or place.endswith(f".{self.field}"))


def known_differences() -> tuple[Known, ...]:
    """All rows of the table."""
    _, _, rest = DOCUMENT.read_text().partition(HEADER)
    rows = rest.strip().splitlines()[1:]
    found = []
    for row in rows:
        if not row.startswith("|"):
            break
        match = _ROW.fullmatch(row)
        assert match is not None, row
        found.append(Known(match["endpoint"], match["field"]))
    return tuple(found)
