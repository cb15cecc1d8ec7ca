"""Rates of the loads of `ops.bench doors`, found with one door and kept for later runs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ops.bench.doors_cells import SEARCHED, SHARES, Cell
from ops.bench.progress import say
from ops.bench.rate_search import RateSearch

KEPT = Path("results/doors/rates.json")
PROBES = 4
TOLERANCE = 0.02

Missed = Callable[[float], Awaitable[float]]
"""Rate of a trial -> share of first-token targets that the door `SEARCHED` misses."""


@dataclass(frozen=True, slots=True)
class KeptRates:
    """
    A file with rates that were found before.

    Args:
        path: The file; it need not exist.
    """

    path: Path = KEPT

    async def found(self, cell: Cell, load: str, key: str, missed: Missed) -> float:
        """
        The rate of a load: the kept one, else that of a search from the cell's rate.

        Args:
            cell: The cell.
            load: A load of `SHARES`.
            key: What the rate depends on, beside cell and load.
            missed: One trial.
        """
        name = f"{cell.name}, {load}, {key}"
        kept = self._read()
        if name not in kept:
            share, search = SHARES[load], RateSearch(first_rps=cell.rates[load], step=1.15)
            for _ in range(PROBES):
                rate_rps = search.next_rps(share)
                search.missed[rate_rps] = await missed(rate_rps)
                say(f"{SEARCHED} at {rate_rps:.2f}/s misses {search.missed[rate_rps]:.1%}")
                if abs(search.missed[rate_rps] - share) <= TOLERANCE * (0.5 + share):
                    break
            kept = self._read() | {name: search.nearest_rps(share)}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(msgspec.json.encode(kept))
        return kept[name]

    def _read(self) -> dict[str, float]:
        if not self.path.exists():
            return {}
        return msgspec.json.decode(self.path.read_bytes(), type=dict[str, float])
