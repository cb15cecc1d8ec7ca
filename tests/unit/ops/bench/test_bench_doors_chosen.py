"""What `ops.bench doors` measures, and the rates of its loads."""

from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.doors import QUICK, Chosen
from ops.bench.doors_cells import CELLS
from ops.bench.doors_rates import KeptRates
from shared.contracts.errors import SettingsError

CELL = CELLS["chat-batch-8"]


@pytest.mark.parametrize("chosen", [Chosen(), QUICK, replace(QUICK, loads=("6.5", "killed"))])
def test_known_names_and_rates_can_be_chosen(chosen: Chosen):
    chosen.check()


@pytest.mark.parametrize(
    "chosen",
    [
        replace(QUICK, cells=("chats",)),
        replace(QUICK, doors=("nginx",)),
        replace(QUICK, loads=("20%",)),
        replace(QUICK, scale=0.0),
        replace(QUICK, seeds=()),
    ],
)
def test_unknown_names_are_refused(chosen: Chosen):
    with pytest.raises(SettingsError):
        chosen.check()


async def test_a_rate_is_searched_once_for_what_it_depends_on(tmp_path: Path):
    tried = []

    async def missed(rate_rps: float) -> float:
        tried.append(rate_rps)
        return max(0.0, (rate_rps - 5.0) / 10.0)

    rates = KeptRates(tmp_path / "kept" / "rates.json")
    found = await rates.found(CELL, "30%", "60 s", missed)
    number = len(tried)

    assert await missed(found) == pytest.approx(0.3, abs=0.02)
    assert tried[0] == CELL.rates["30%"]
    assert await KeptRates(rates.path).found(CELL, "30%", "60 s", missed) == found
    assert len(tried) == number + 1
    await rates.found(CELL, "30%", "20 s", missed)
    assert len(tried) > number + 1
