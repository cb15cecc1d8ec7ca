"""
`make gpu-check`: checks and measures vLLM on the device of this machine.

Each part runs even if an earlier one failed. The exit code is 1 if any part failed.
"""

import sys
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from ops.bench.given_model import given_model
from ops.check_engine.engine_part import GIVEN, engine
from ops.check_engine.machine import machine
from ops.check_engine.part import Options, Part, PartResult
from ops.check_engine.programs import bench, profile, suite
from ops.check_engine.report import Report, markdown, unexplained
from ops.devices import gpus
from services.agent.verbs.cli_check_engine import DEFAULTS, CheckOptions
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.lifecycle import EXIT_USAGE
from shared.runtime.logging import configure_logging
from shared.runtime.options import JsonOption
from shared.runtime.program import Program, verb

BENCHES = {
    "engine": "Headway's policy inside the engine against vLLM's own policies, under equal loads.",
    "lso": "Cost and gain of swaps between models, KV checkpoints and preemption between layers, "
    "as far as the engine has them on this device.",
    "surface": "CPU time of the mesh against `vllm serve`; needs RabbitMQ.",
}


def parts(options: Options) -> list[Part]:
    """The parts of a check, in order."""
    made = [
        Part(name="machine", about="Device, driver and versions.", run=machine),
        Part(
            name="engine",
            about="An engine with the default settings of this device, its choices and its speed.",
            run=engine,
            log="engine.log",
        ),
        Part(
            name="suite",
            about="The contract that every engine must keep, as tests with tiny models.",
            run=suite,
            log="suite.log",
        ),
    ]
    made += [
        Part(name=f"bench {name}", about=about, run=partial(bench, name), log=f"bench-{name}.log")
        for name, about in BENCHES.items()
    ]
    if options.has_gpu:
        about = "Latency model of the device, for `headway simulate --profile`."
        made.append(Part(name="profile", about=about, run=profile, log="profile.log"))
    return made


def check(*, given: CheckOptions = DEFAULTS, json: JsonOption = False) -> int:
    """
    Check and measure vLLM on the device of this machine, and write one report.

    With `--json` the report is also printed as one JSON line at the end. The exit code is 1 if a
    part failed, and 2 for an unusable model.
    """
    if given.model is not None:
        try:
            given_model(given.model, GIVEN)
        except SettingsError as error:
            print(f"check-engine: {error}", file=sys.stderr)
            return EXIT_USAGE
    given.out.mkdir(parents=True, exist_ok=True)
    configure_logging(level="error", service="check-engine")
    model = None if given.model is None else given.model.resolve()
    options = Options(out=given.out.resolve(), quick=given.quick, model=model, has_gpu=bool(gpus()))
    report = Report(
        at=time.time(), quick=given.quick, model=str(model or ""), parts=_results(options)
    )
    (options.out / "report.json").write_bytes(msgspec.json.encode(report) + b"\n")
    (options.out / "report.md").write_text(markdown(report))
    for name in unexplained(report.parts):
        _say(f"without a sentence in ops/check_engine/explanations.py: {name}")
    if json:
        print(msgspec.json.encode(report).decode(), flush=True)
    verdict = f"failed: {', '.join(report.failed)}" if report.failed else "every part passed"
    _say(f"check-engine: {verdict}; {given.out / 'report.md'}")
    return 1 if report.failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run the check; return 1 if a part failed or the report cannot be written, 2 for invalid
    arguments.
    """
    program = Program(verb("python -m ops.check_engine", check), failures=(MeshError, OSError))
    return program.main(arguments)


def _results(options: Options) -> list[PartResult]:
    found = []
    chosen = parts(options)
    for number, part in enumerate(chosen, start=1):
        _say(f"[{number}/{len(chosen)}] {part.name}: {part.about}")
        if part.log:
            _say(f"    progress: {options.out / part.log}")
        result = part.result(options)
        verdict = f"FAILED: {result.found.failure}" if result.failed else "passed"
        _say(f"[{number}/{len(chosen)}] {part.name}: {verdict} ({result.duration_s:g} s)")
        found.append(result)
    return found


def _say(text: str) -> None:
    """Print progress on standard error, since standard output has the JSON line."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
