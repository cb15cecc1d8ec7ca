"""
The cells of `ops.bench doors` in virtual time, to compare Headway's policy with clients in seconds.

The arrivals are those of `doors`, and the servers compute as fast, with the same limits. The
instances of the mesh are the shipped state machine, and other processes are only the times that
they take. Agents are left out, since the servers have no prefix cache here, and so are other
products, real servers, and servers that end.

Loads are the rates at which the best client misses a share of the targets of the classes with a
target for the first token.
"""

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from ops.bench.doors_cells import CELLS, SECONDS, SHARES, Cell
from ops.bench.doors_server import PLAIN
from ops.bench.doors_simulated_report import Place, report
from ops.bench.doors_simulated_rounds import ARMS, CLIENTS, Load, Round, serve
from ops.bench.progress import counted, say
from ops.bench.rate_search import RateSearch
from ops.bench.result import Result
from shared.contracts.base import Seconds


def _plain(max_running: int) -> Cell:
    """Chats beside batch requests in front of servers that are not vLLM."""
    vllm = CELLS[f"chat-batch-{max_running}"]
    return replace(vllm, name=f"plain-{max_running}", kind=PLAIN)


SIMULATED: Mapping[str, Cell] = {
    cell.name: cell
    for cell in (
        *(CELLS[f"chat-batch-{number}"] for number in (4, 8, 64)),
        *(_plain(number) for number in (4, 8, 64)),
        *(CELLS[name] for name in ("tiers-8", "two-models-8", "long-answers-8")),
    )
}
QUICK_CELLS = ("chat-batch-8", "tiers-8")
QUICK_LOADS = ("10%", "50%")
NUM_SEEDS = 3
_PROBES = 8
"""Largest number of trials for one share; those for other shares count also."""
_TOLERANCE = 0.05
"""Largest difference from a share, as a part of it."""
_LEAST_TOLERANCE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for the rates of a cell."""

    cell: Cell
    loads: Sequence[str]
    seeds: Sequence[int]
    seconds: Seconds = SECONDS

    def places(self) -> list[Place]:
        """The loads, with the rates at which the best client misses their shares."""
        search = RateSearch(first_rps=self.cell.rates[self.loads[0]], step=1.15)
        for load in self.loads:
            share = SHARES[load]
            tolerance = max(_LEAST_TOLERANCE, _TOLERANCE * share)
            for _ in range(_PROBES):
                rate_rps = search.next_rps(share)
                if rate_rps in search.missed:
                    break
                search.missed[rate_rps] = self._missed(rate_rps)
                if abs(search.missed[rate_rps] - share) <= tolerance:
                    break
        return [
            Place(
                cell=self.cell.name,
                load=load,
                rate_rps=search.nearest_rps(SHARES[load]),
            )
            for load in self.loads
        ]

    def _missed(self, rate_rps: float) -> float:
        """Median over the seeds of the misses of the best client."""
        loads = [
            Load(cell=self.cell, rate_rps=rate_rps, seconds=self.seconds, seed=seed)
            for seed in self.seeds
        ]
        return min(
            statistics.median(serve(name, load).missed for load in loads) for name in CLIENTS
        )


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:  # noqa: ARG001 - as all benches
    """Run the benchmark; a quick run has one seed, two cells and two loads."""
    result = Result(name="doors_simulated", seed=seed, quick=quick)
    seeds = range(seed, seed + (1 if quick else NUM_SEEDS))
    names, shares = (QUICK_CELLS, QUICK_LOADS) if quick else (tuple(SIMULATED), tuple(SHARES))
    searches = [Search(cell=SIMULATED[name], loads=shares, seeds=seeds) for name in names]
    with ProcessPoolExecutor() as pool:
        places: list[Place] = []
        for found in pool.map(Search.places, searches):
            rates = ", ".join(f"{place.load} at {place.rate_rps:.2f}/s" for place in found)
            say(f"{found[0].cell}: the best client misses {rates}")
            places += found
        asked = [(place, each) for place in places for each in seeds]
        rounds = counted(pool.map(_rounds, *zip(*asked, strict=True)), len(asked), "loads")
        every = list(zip(asked, rounds, strict=True))
    measured = {
        place: {name: [found[name] for (at, _), found in every if at == place] for name in ARMS}
        for place in places
    }
    report(result, measured)
    return result


def _rounds(place: Place, seed: int) -> dict[str, Round]:
    """Arm -> its round."""
    load = Load(cell=SIMULATED[place.cell], rate_rps=place.rate_rps, seconds=SECONDS, seed=seed)
    return {name: serve(name, load) for name in ARMS}
