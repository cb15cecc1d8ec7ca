"""
What a user can put in front of servers that run already, side by side.

Every door gets the same arrivals in front of new servers of the same kind. The servers are
simulated as vLLM's API server schedules, so that four of them fit beside a mesh on two cores; one
cell has four real `vllm serve`. Loads are those at which a client that chooses the server with the
fewest open requests, with `priority`, misses a share of the first-token targets; misses are
compared with those of the best other door there.

`python -m ops.bench.doors` has options for cells, doors, loads and seeds.
"""

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from ops.bench.doors_cells import (
    CELLS,
    KILLED,
    QUICK_CELL,
    QUICK_DOORS,
    QUICK_LOAD,
    QUICK_SECONDS,
    REAL,
    SATURATED,
    SEARCHED,
    SECONDS,
    SEEDS,
    SHARES,
    Cell,
)
from ops.bench.doors_fronts import DOORS, Door, install_command
from ops.bench.doors_processes import Brokers, RunningServer, brokers
from ops.bench.doors_rates import KEPT, KeptRates
from ops.bench.doors_real import real_servers, without_cached_prompts
from ops.bench.doors_report import Run, Runs, report
from ops.bench.doors_rounds import Asked, Round, measured
from ops.bench.progress import say
from ops.bench.result import Result
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError, MeshError, SettingsError
from shared.runtime.logging import configure_logging

LOADS = (*SHARES, SATURATED, KILLED)
ROUNDS = KEPT.with_name("rounds.jsonl")
"""File with every round that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a run measures."""

    cells: tuple[str, ...] = tuple(CELLS)
    doors: tuple[str, ...] = tuple(DOORS)
    loads: tuple[str, ...] = LOADS
    """Names of loads, or rates in sessions per second."""
    seeds: tuple[int, ...] = SEEDS
    scale: float = 1.0
    seconds: Seconds = SECONDS
    is_searched: bool = True
    """True: rates are found or kept ones; False: those of the cells."""

    def check(self) -> None:
        """
        Check the names.

        Raises:
            SettingsError: A name is unknown, or a value is not positive.
        """
        for kind, names, known in (
            ("cell", self.cells, CELLS),
            ("door", self.doors, DOORS),
            ("load", [name for name in self.loads if _rate_of(name) is None], LOADS),
        ):
            for name in names:
                if name not in known:
                    raise SettingsError(f"unknown {kind} {name!r}: {', '.join(known)}")
        if min(self.scale, self.seconds) <= 0 or not self.seeds:
            raise SettingsError("scale and seconds must be positive, and there must be a seed")


QUICK = Chosen(
    cells=(QUICK_CELL,),
    doors=QUICK_DOORS,
    loads=(QUICK_LOAD,),
    seconds=QUICK_SECONDS,
    is_searched=False,
)


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run has one cell, one load, one seed, and no peers."""
    chosen = replace(QUICK, seeds=(seed,)) if quick else Chosen()
    if not quick and seed:
        chosen = replace(chosen, seeds=tuple(seed + number for number in range(len(SEEDS))))
    return await measure(chosen, seed=seed, quick=quick, broker=broker)


async def measure(chosen: Chosen, *, seed: int, quick: bool, broker: str | None) -> Result:
    """
    Measure what was chosen.

    Raises:
        SettingsError: A name is unknown, or the broker is not available.
        EngineError: A real server does not start.
    """
    chosen.check()
    result = Result(name="doors", seed=seed, quick=quick)
    missing = [name for name in chosen.doors if not DOORS[name].is_installed]
    if missing:
        say(f"not installed: {', '.join(missing)}; to measure them:\n{install_command()}")
    every: list[Run] = []
    with brokers(broker) as available:
        for name in chosen.cells:
            reason = vllm_unavailable_reason() if CELLS[name].kind == REAL else None
            if reason is not None:
                say(f"{name} is left out: {reason}")
                continue
            async with _running(CELLS[name]) as running:
                every += [each async for each in _cell(CELLS[name], chosen, available, running)]
    report(result, Runs(every))
    return result


async def _cell(
    cell: Cell, chosen: Chosen, available: Brokers, running: Sequence[RunningServer] | None
) -> AsyncIterator[Run]:
    """All rounds of a cell."""
    for load in chosen.loads:
        if load == KILLED and running is not None:
            continue
        rate_rps = await _rate(cell, load, chosen, available, running)
        for seed in chosen.seeds:
            asked = Asked(
                cell=cell,
                load=load,
                rate_rps=rate_rps,
                seconds=chosen.seconds,
                seed=seed,
                scale=chosen.scale,
            )
            for door in (DOORS[name] for name in chosen.doors):
                if door.needs_sessions and not cell.has_sessions:
                    continue
                found = await _round(asked, door, available, running)
                measured_run = Run(
                    cell=cell.name,
                    load=load,
                    rate_rps=rate_rps,
                    seed=seed,
                    scale=chosen.scale,
                    door=door.name,
                    round=found,
                )
                _keep(measured_run)
                yield measured_run


def _keep(run: Run) -> None:
    """Append a round to `ROUNDS`, so that a run that is ended early leaves its figures."""
    ROUNDS.parent.mkdir(parents=True, exist_ok=True)
    with ROUNDS.open("ab") as file:
        file.write(msgspec.json.encode(run) + b"\n")


async def _round(
    asked: Asked, door: Door, available: Brokers, running: Sequence[RunningServer] | None
) -> Round | None:
    """One round, printed; None if the door is not installed, or does not start."""
    if not door.is_installed:
        return None
    if running is not None:
        await without_cached_prompts(running)
    try:
        found = await measured(asked, door, available, running)
    except EngineError as error:
        say(f"{asked.cell.name}, {asked.load}, {door.name}: {error}")
        return None
    shares = ", ".join(f"{name} {each.in_time:.1%}" for name, each in found.classes.items())
    say(
        f"{asked.cell.name}, {asked.load}, {asked.rate_rps:.3g}/s, seed {asked.seed}, "
        f"{door.name}: in time {shares}; lost {found.lost}; cached {found.cached:.1%}; "
        f"all done after {found.all_done_s:.1f} s"
    )
    return found


async def _rate(
    cell: Cell,
    load: str,
    chosen: Chosen,
    available: Brokers,
    running: Sequence[RunningServer] | None,
) -> float:
    """Sessions per second of a load."""
    given = _rate_of(load)
    if given is not None:
        return given
    if load == SATURATED:
        return 2 * await _rate(cell, list(SHARES)[-1], chosen, available, running)
    name = "10%" if load == KILLED else load
    if not chosen.is_searched:
        return cell.rates[name]

    async def missed(rate_rps: float) -> float:
        shares = []
        for seed in chosen.seeds:
            asked = Asked(
                cell=cell,
                load=name,
                rate_rps=rate_rps,
                seconds=chosen.seconds,
                seed=seed,
                scale=chosen.scale,
            )
            found = await _round(asked, DOORS[SEARCHED], available, running)
            shares.append(found.missed if found else 0.0)
        return statistics.fmean(shares)

    seeds = " ".join(map(str, chosen.seeds))
    key = f"{chosen.seconds:g} s, scale {chosen.scale:g}, seeds {seeds}"
    return await KeptRates().found(cell, name, key, missed)


def _rate_of(load: str) -> float | None:
    """The rate if *load* is one."""
    try:
        return float(load)
    except ValueError:
        return None


@asynccontextmanager
async def _running(cell: Cell) -> AsyncIterator[Sequence[RunningServer] | None]:
    """Real servers, which run for all rounds of a cell; None for simulated ones."""
    if cell.kind != REAL:
        yield None
        return
    async with real_servers(cell) as servers:
        yield servers


app = App(name="python -m ops.bench.doors", help=__doc__)


@app.default
def main(
    *,
    cells: str = ",".join(CELLS),
    doors: str = ";".join(DOORS),
    loads: str = ",".join(LOADS),
    seeds: str = ",".join(map(str, SEEDS)),
    scale: float = 1.0,
    seconds: float = SECONDS,
    searched: bool = True,
    broker: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    out: Path = Path("results"),
) -> int:
    """
    Measure chosen cells, doors and loads.

    Args:
        cells: Names, separated by commas.
        doors: Names, separated by semicolons, since some contain a comma.
        loads: Names, or rates in sessions per second, separated by commas.
        seeds: Seeds of the arrivals, separated by commas.
        scale: Slow motion: servers, arrivals and targets are so many times slower.
        seconds: Duration of the arrivals at full speed.
        searched: Find the rates of named loads, or take those of earlier runs; otherwise, those of
            the cells.
        broker: AMQP URL, `embedded`, or `private`; default: a private node.
        as_json: The last line of the output is one JSON object.
        out: Directory of the history.
    """
    configure_logging(level="error", service="bench")
    chosen = Chosen(
        cells=tuple(cells.split(",")),
        doors=tuple(each.strip() for each in doors.split(";")),
        loads=tuple(loads.split(",")),
        seeds=tuple(int(each) for each in seeds.split(",")),
        scale=scale,
        seconds=seconds,
        is_searched=searched,
    )
    try:
        result = asyncio.run(measure(chosen, seed=chosen.seeds[0], quick=False, broker=broker))
    except MeshError as error:
        print(f"doors: {error}", file=sys.stderr)
        return 1
    result.show()
    result.save(out)
    if as_json:
        print(msgspec.json.encode(result.data()).decode(), flush=True)
    return 0 if result.holds else 1


if __name__ == "__main__":
    raise SystemExit(app())
