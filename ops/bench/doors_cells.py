"""Cells of `ops.bench doors`: servers, traffic, and the rates of its loads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ops.bench.doors_server import PLAIN, VLLM
from ops.bench.doors_traffic import (
    LONG_ANSWERS,
    TWO_MODELS,
    MakeSession,
    agent,
    chat_and_batch,
    tiers,
)

REAL = "real"
"""Kind of servers that are `vllm serve` with a tiny model on this machine's CPU."""
LIGHT_LOADS: Mapping[str, float] = {"2%": 0.02, "10%": 0.10}
HEAVY_LOADS: Mapping[str, float] = {"30%": 0.30, "50%": 0.50}
SHARES: Mapping[str, float] = {**LIGHT_LOADS, **HEAVY_LOADS}
"""Load -> share of first-token targets that the door `SEARCHED` misses at its rate."""
SATURATED = "saturated"
"""Load at twice the rate of the heaviest other load, for half of the time."""
KILLED = "killed"
"""Load of `10%` during which one server is killed and started again."""
SEARCHED = "least loaded, priority"
"""Door with which the rates are found; the report names the best other door at each rate."""
SEEDS = (3, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Servers and traffic of one comparison."""

    name: str
    make: MakeSession
    max_running: int = 8
    """Limit of each server."""
    kind: str = VLLM
    models: tuple[str, ...] = ("m",) * 4
    """Model of each server."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Load -> sessions per second at full speed; the begin of a search."""
    has_sessions: bool = False
    compares_misses: bool = False
    """True if the acceptance line about heavy loads includes the cell."""
    word_share: float = 1.0
    """Prompts are shortened to this share of their words."""


_CHAT_8 = {"2%": 6.2, "10%": 7.5, "30%": 9.5, "50%": 11.0}
CELLS: Mapping[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell(
            name="chat-batch-4",
            make=chat_and_batch,
            max_running=4,
            rates={"2%": 3.6, "10%": 4.4, "30%": 5.8, "50%": 7.0},
            compares_misses=True,
        ),
        Cell(name="chat-batch-8", make=chat_and_batch, rates=_CHAT_8, compares_misses=True),
        Cell(
            name="chat-batch-64",
            make=chat_and_batch,
            max_running=64,
            rates={"2%": 11.0, "10%": 13.5, "30%": 17.0, "50%": 20.0},
            compares_misses=True,
        ),
        Cell(name="plain-8", make=chat_and_batch, kind=PLAIN, rates=_CHAT_8),
        Cell(
            name="agents-8",
            make=agent,
            rates={"2%": 1.3, "10%": 1.7, "30%": 2.1, "50%": 2.4},
            has_sessions=True,
        ),
        Cell(
            name="tiers-8",
            make=tiers,
            rates={"2%": 8.5, "10%": 10.0, "30%": 12.5, "50%": 15.0},
            compares_misses=True,
        ),
        Cell(
            name="two-models-8",
            make=TWO_MODELS,
            models=("m", "m", "n", "n"),
            rates={"2%": 5.5, "10%": 6.8, "30%": 8.8, "50%": 10.5},
            compares_misses=True,
        ),
        Cell(
            name="long-answers-8",
            make=LONG_ANSWERS,
            rates={"2%": 0.9, "10%": 1.2, "30%": 1.5, "50%": 1.8},
        ),
        Cell(
            name="real-8",
            make=chat_and_batch,
            kind=REAL,
            rates={"2%": 3.0, "10%": 6.0, "30%": 9.0, "50%": 12.0},
            word_share=0.3,
        ),
    )
}
QUICK_CELL, QUICK_LOAD = "chat-batch-8", "10%"
QUICK_DOORS = ("round robin", SEARCHED, "headway")
QUICK_SECONDS, SECONDS = 8.0, 60.0
