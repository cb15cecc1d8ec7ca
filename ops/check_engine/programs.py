"""Parts that run other programs of the checkout: the contract suite, benches, and the profiler."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from ops.check_engine.engine_part import entry_of
from ops.check_engine.part import AcceptanceLine, Found, Options, PartFailedError
from ops.devices import gpus
from shared.models.registry import write_registry

_SUITE = "tests/contract/engine"
ENGINES = ("vllm-two-devices", "vllm-as-on-gpu", "vllm-policy", "vllm", "simulated")
"""Engines of the suite; a name precedes the names that it begins with."""
_ROOT = Path(__file__).resolve().parents[2]
_LAST_LINES = 15
_QUICK_GRID = ("--chunks=64,512,2048", "--contexts=512", "--batches=8", "--repeats=2")


def run(command: Sequence[str], log: Path, **variables: str) -> str:
    """
    Run *command* in the root of the checkout with its output in *log*, and return the output.

    Raises:
        PartFailedError: The exit code is not 0; the message has the end of the output.
    """
    # One thread for each engine on a CPU: more would only wait for each other.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | variables
    with log.open("wb") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, env=environment, cwd=_ROOT, check=False
        )
    output = log.read_text(errors="replace")
    if done.returncode:
        last = "\n".join(output.splitlines()[-_LAST_LINES:])
        raise PartFailedError(f"exit code {done.returncode}; the end of {log}:\n{last}")
    return output


def suite(options: Options) -> Found:
    """Run the contract suite of engines; a quick run has its short tests only."""
    results = options.out / "suite.xml"
    results.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", _SUITE),
        *("-m", "vllm and not slow" if options.quick else "vllm"),
        f"--junitxml={results}",
    ]
    if options.has_gpu and len(gpus()) == 1:
        command += ["-k", "not two-devices"]
    try:
        run(command, options.out / "suite.log", HEADWAY_REQUIRE="vllm")
    except PartFailedError as error:
        if not results.exists():
            raise
        return _counted(results, failure=str(error))
    return _counted(results)


def _counted(results: Path, failure: str = "") -> Found:
    """Counts of a JUnit file, for each kind of engine (the parameter of the tests)."""
    counts: dict[str, dict[str, int]] = {}
    failed: list[str] = []
    for case in ET.parse(results).iter("testcase"):
        name = case.get("name", "")
        rig = _engine_of(name)
        outcome = _outcome(case)
        counts.setdefault(rig, {"passed": 0, "failed": 0, "skipped": 0})[outcome] += 1
        if outcome == "failed":
            failed.append(name)
    figures: dict[str, Any] = {f"tests, {rig}": each for rig, each in counts.items()}
    if failed:
        figures["failed tests"] = failed
    return Found(figures=figures, failure=failure)


def _engine_of(name: str) -> str:
    """Engine of a test, the first of its parameters: `vllm-policy` of `test_x[vllm-policy-1]`."""
    parameters = name.partition("[")[2].rstrip("]")
    return next((each for each in ENGINES if parameters.startswith(each)), "other tests")


def _outcome(case: ET.Element) -> str:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


class _BenchData(msgspec.Struct):
    """The JSON line of `python -m ops.bench`."""

    holds: bool
    figures: dict[str, Any] = {}
    acceptance: list[AcceptanceLine] = []
    error: str = ""


def bench(name: str, options: Options) -> Found:
    """
    Run one benchmark.

    Raises:
        PartFailedError: The bench failed before it had a result.
    """
    command = [sys.executable, "-m", "ops.bench", name, "--json", "--out", str(options.out)]
    command += ["--quick"] if options.quick else []
    command += ["--model", str(options.model)] if options.model else []
    log = options.out / f"bench-{name}.log"
    failure = ""
    try:
        output = run(command, log)
    except PartFailedError as error:
        failure = str(error)
        output = log.read_text(errors="replace")
    data = _last_json(output.splitlines())
    if data is None or data.error:
        raise PartFailedError(failure if data is None else data.error)
    broken = [line.line for line in data.acceptance if line.holds is False]
    if broken:
        failure = f"lines do not hold: {'; '.join(broken)}"
    elif not data.holds:
        failure = "" if options.quick else "no acceptance line was measured"
    return Found(figures=data.figures, lines=data.acceptance, failure=failure)


def _last_json(lines: Iterable[str]) -> _BenchData | None:
    for line in reversed(list(lines)):
        if line.startswith("{"):
            return msgspec.json.decode(line, type=_BenchData)
    return None


def profile(options: Options) -> Found:
    """Measure a profile of the device, which the simulator reads."""
    registry, file = options.out / "registry.json", options.out / "profile.json"
    write_registry(registry, (entry_of(options),))
    command = [
        *(sys.executable, "-m", "ops.profiling", "--engine", "vllm"),
        *("--registry", str(registry), "--out", str(file)),
        *("--engine-log", str(options.out / "profile-engine.log")),
        *(_QUICK_GRID if options.quick else ()),
    ]
    run(command, options.out / "profile.log")
    return Found(
        figures={"profile": str(file), **msgspec.json.decode(file.read_bytes(), type=dict)}
    )
