"""The help of all programs of a checkout fits a terminal of 80 columns."""

import os
import subprocess
import sys

import pytest

WIDTH = 80
PROGRAMS = (
    *("ops.bench", "ops.broker", "ops.check_engine", "ops.clients", "ops.demo"),
    *("ops.release", "ops.setup", "ops.test"),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_line_is_longer_than_a_terminal(program: str):
    done = subprocess.run(
        [sys.executable, "-m", program, "--help"],
        env=os.environ | {"COLUMNS": str(WIDTH)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert [line for line in done.stdout.splitlines() if len(line) > WIDTH] == []
