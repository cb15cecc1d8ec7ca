# ruff: noqa: INP001 - Python imports it by its name, from a folder and not from a package
"""
Records which statements of the project a process runs, by the part of a measurement.

Each Python process that has this folder in `PYTHONPATH` imports it at its start. Signals change the
part: the file `part` in the folder of `HEADWAY_ROAD` has its name, and with the name `report` the
process writes what it has recorded to a file named after its id.
"""

import json
import os
import signal
import threading
from pathlib import Path
from types import FrameType

import coverage

FOLDER = Path(os.environ["HEADWAY_ROAD"])
ROOT = Path(__file__).parents[3]
REPORT = "report"

_coverage = coverage.Coverage(
    data_file=None,
    config_file=False,
    concurrency="thread",
    source=[str(ROOT / name) for name in ("services", "shared", "solver")],
    messages=False,
)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    part = (FOLDER / "part").read_text()
    if part == REPORT:
        # In a thread: the signal may have interrupted code that holds the lock of the data.
        threading.Thread(target=_report, args=(os.getpid(),)).start()
    else:
        _coverage.switch_context(part)


def _report(pid: int) -> None:
    data = _coverage.get_data()
    found: dict[str, dict[str, list[int]]] = {}
    for part in data.measured_contexts():
        data.set_query_context(part)
        found[part] = {file: sorted(data.lines(file) or ()) for file in data.measured_files()}
    written = FOLDER / f"{pid}.writing"
    written.write_text(json.dumps(found))
    written.rename(FOLDER / f"{pid}.json")


_coverage.start()
_coverage.switch_context("start")
signal.signal(signal.SIGRTMIN + 5, _on_signal)
