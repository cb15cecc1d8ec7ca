"""Serve the same seeded load twice, by plain FCFS and by Headway, and compare."""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from ops.demo.arms import ARMS, MODELS, Arm
from ops.demo.conditions import load_warning, spread_warning, wait_for_agents
from ops.demo.drive import Record, drive, measure_capacity, send_malformed
from ops.demo.report import arm_figures, is_success, plot, print_table, sentence
from ops.demo.totals import agent_totals
from ops.demo.workload import Planned, plan_workload
from ops.environment import broker_for, engine_for
from services.mesh.launch import mesh_of
from services.mesh.mesh import READY_TIMEOUT_S, Mesh, stop_signals
from services.mesh.spec import EMBEDDED
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from shared.runtime.logging import configure_logging

STATE = Path(".headway")
LOAD_S: dict[str, Seconds] = {"simulated": 15.0, "vllm": 40.0}
"""Default length of each arm's load, by engine; with simulated engines, the demo takes 75 s."""
LOOP_S: dict[str, Seconds] = {"simulated": 3.0, "vllm": 8.0}
"""Measured part of the closed loop, by engine."""
KILLED = {
    False: "the process of one of two agents, by SIGKILL, restarted after 2 s",
    True: (
        "one of two agents with its simulated or real engine, by cancelling its task without a "
        "drain, since all agents share one process; restarted after 2 s"
    ),
}
"""Description of the kill of an agent; the key is true for the embedded broker."""
QUIET_ENGINES = {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
"""
Environment variables that silence engines; with the embedded broker, engines log to this terminal.
"""
INTERRUPTED = 130
"""Exit code of a shell's command that Ctrl-C has ended."""
_STARTED = time.monotonic()


def main() -> int:
    """
    Run the two arms of the demo; return 0 if no request was lost and Headway met more targets.
    """
    parser = argparse.ArgumentParser(prog="python -m ops.demo", description=__doc__)
    parser.add_argument("--engine", help="vllm (fails if it cannot run) or simulated")
    parser.add_argument("--broker", help="AMQP URL, private, or embedded")
    parser.add_argument("--seconds", type=float, default=None, help="length of each arm's load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="directory of the plot and the figures"
    )
    options = parser.parse_args()
    configure_logging(level="critical", service="demo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores slow engines down
    _warn(load_warning(os.getloadavg()[0], num_cores=len(os.sched_getaffinity(0))))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        engine, engine_line = engine_for(options.engine)
        say(engine_line)
        return asyncio.run(run(options, engine))
    except (MeshError, OSError) as error:
        say(f"failed: {error}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return INTERRUPTED


async def run(options: argparse.Namespace, engine: str) -> int:
    """
    Serve the load in each arm of the demo, and report the results; a signal cancels it, so that
    the mesh and a private broker are stopped.
    """
    _cancel_at_signals()
    models = make_tiny_models(STATE / "models", weights=engine == "vllm")
    registry = _only(models, STATE / "demo" / "models.json")
    duration_s = options.seconds or LOAD_S[engine]
    workload: list[Planned] = []
    records: dict[str, Record] = {}
    scheme = ""
    for arm in ARMS:
        with broker_for(options.broker) as (broker, broker_line):
            say(f"{arm.title}: {broker_line}")
            async with _ready(arm, engine, broker, registry) as (mesh, producer):
                say(f"{arm.title}: ready, closed loop at full load")
                by_model = await measure_capacity(
                    arm, producer, window_s=LOOP_S[engine], seed=options.seed
                )
                _warn(spread_warning(by_model))
                capacity_rps = sum(by_model.values())
                say(f"{arm.title}: capacity {capacity_rps:.1f} requests/s")
                workload = workload or plan_workload(
                    MODELS, duration_s=duration_s, capacity_rps=capacity_rps, seed=options.seed
                )
                record = await _serve(arm, mesh, producer, workload, duration_s)
        record.capacity_rps = capacity_rps
        records[arm.name] = record
        scheme = broker.partition("://")[0]
    _warn(spread_warning({arm.title: records[arm.name].capacity_rps for arm in ARMS}))
    data = {
        "engine": engine,
        "broker": scheme,
        "seed": options.seed,
        "load_s": duration_s,
        "killed": KILLED[scheme == EMBEDDED],
        "arms": {name: arm_figures(record) for name, record in records.items()},
        "elapsed_s": round(time.monotonic() - _STARTED, 1),
    }
    print_table(data)
    plot(records, ARMS, duration_s=duration_s, file=options.out / "demo.png")
    encoded = msgspec.json.encode(data)
    (options.out / "demo.json").write_bytes(msgspec.json.format(encoded, indent=2))
    say(f"plot and figures: {options.out / 'demo.png'}, {options.out / 'demo.json'}")
    print(sentence(data["arms"]))
    if options.json:
        print(encoded.decode())
    return 0 if is_success(data["arms"]) else 1


def _cancel_at_signals() -> None:
    """Cancel this task at the first signal that stops the demo; ignore further ones."""
    task = asyncio.current_task()
    is_stopping = False

    def on_signal() -> None:
        nonlocal is_stopping
        if task is not None and not is_stopping:
            is_stopping = True
            task.cancel()
            say("stopping ...")

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def _serve(
    arm: Arm, mesh: Mesh, producer: Producer, workload: list[Planned], duration_s: Seconds
) -> Record:
    """Send the load and the malformed requests to a mesh that is warmed up."""
    say_change = only_changes(say)
    async with (
        mesh.open_broker("headway-watch") as watching,
        agent_totals(watching) as totals,
    ):
        refusals = await send_malformed(watching)
        record = await drive(
            arm,
            mesh,
            producer,
            workload,
            duration_s=duration_s,
            totals=totals,
            progress=lambda record: say_change(
                f"{arm.title}: sent {record.sent} of {len(workload)}, "
                f"answered {len(record.outcomes)}, running {totals.running()}"
            ),
        )
    record.refusals = refusals
    return record


@contextlib.asynccontextmanager
async def _ready(
    arm: Arm, engine: str, broker: str, registry: Path
) -> AsyncIterator[tuple[Mesh, Producer]]:
    """
    Start a new mesh of *arm*; yield the mesh, when its agents serve, with a trusted producer on a
    separate connection.
    """
    spec = arm.spec(engine=engine, broker=broker, registry=registry, log_dir=STATE / "demo")
    user_id = "guest"
    if broker == EMBEDDED:
        for name, value in QUIET_ENGINES.items():
            os.environ.setdefault(name, value)
    else:
        user_id = unquote(urlsplit(broker).username or "guest")
    async with (
        mesh_of(spec) as mesh,
        mesh.open_broker("headway-demo") as connection,
        Producer(connection, name="demo", clock=SystemClock(), user_id=user_id) as producer,
    ):
        await wait_for_agents(connection, spec.agents, timeout_s=READY_TIMEOUT_S, check=mesh.check)
        yield mesh, producer


def _only(registry: Path, file: Path) -> Path:
    """Return a registry that contains only the demo's models."""
    known = ModelRegistry.load(registry)
    write_registry(file, [known.entry(name) for name in known.bases if name in MODELS])
    return file


def only_changes(said: Callable[[str], None]) -> Callable[[str], None]:
    """A function like *said* that leaves out a line that is the same as the one before."""
    before = ""

    def say_change(text: str) -> None:
        nonlocal before
        if text != before:
            said(text)
        before = text

    return say_change


def _warn(warning: str | None) -> None:
    if warning is not None:
        say(warning)


def say(text: str) -> None:
    """Print one line of progress with the elapsed time."""
    elapsed_s = time.monotonic() - _STARTED
    print(f"demo {elapsed_s:5.1f} s: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
