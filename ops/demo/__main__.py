"""`make demo`."""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec

from ops.demo.drive import Record, drive
from ops.demo.report import figures, plot, print_table
from ops.demo.workload import CLASSES, plan_workload
from ops.environment import broker_for, engine_for
from ops.ports import free_port
from services.mesh.launch import mesh_of
from services.mesh.spec import AgentSpec, MeshSpec
from shared.contracts.errors import MeshError
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from shared.runtime.logging import configure_logging

STATE = Path(".headway")
MODELS = ("tiny-llama", "tiny-qwen")


def main() -> int:
    """Run the demo; 0 when no request was lost and every malformed one was refused rightly."""
    parser = argparse.ArgumentParser(prog="python -m ops.demo", description=__doc__)
    parser.add_argument("--engine", help="vllm (fails if it cannot run) or simulated")
    parser.add_argument("--broker", help="AMQP URL, private, or embedded")
    parser.add_argument("--seconds", type=float, default=None, help="length of the workload")
    parser.add_argument("--rate", type=float, default=None, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the figures as JSON, last line")
    parser.add_argument("--out", type=Path, default=Path("results"), help="for plot and figures")
    options = parser.parse_args()
    configure_logging(level="warning", service="demo")
    try:
        engine, engine_line = engine_for(options.engine)
        with broker_for(options.broker) as (broker, broker_line):
            say(broker_line)
            say(engine_line)
            return asyncio.run(run(options, engine, broker))
    except MeshError as error:
        say(f"failed: {error}")
        return 1


async def run(options: argparse.Namespace, engine: str, broker: str) -> int:
    """Start the mesh, drive it, report."""
    started = time.monotonic()
    models = make_tiny_models(STATE / "models", weights=engine == "vllm")
    served = _only(models, STATE / "demo" / "models.json")
    seconds = options.seconds or (30.0 if engine == "vllm" else 15.0)
    rate = options.rate or (6.0 if engine == "vllm" else 20.0)
    spec = MeshSpec(
        broker=broker,
        registry=served,
        log_dir=STATE / "demo",
        gateway_port=free_port(),
        agents=tuple(
            AgentSpec(
                instance_id=f"demo-{number}",
                engine=engine,
                settings={
                    "initial_model": model,
                    "engine": {"vllm": {"max_running": 32}},
                },
            )
            for number, model in enumerate(MODELS)
        ),
    )
    workload = plan_workload(MODELS, duration_s=seconds, rate_rps=rate, seed=options.seed)
    say(f"starting the mesh (logs: {spec.log_dir})")
    async with mesh_of(spec) as mesh:
        say(f"ready after {time.monotonic() - started:.0f} s; {len(workload)} requests follow")
        record = await drive(mesh, workload, progress=lambda r: show_progress(r, len(workload)))
        print(file=sys.stderr)
    data = figures(record, engine=engine, broker=broker.partition("://")[0])
    print_table(data)
    plot(record, options.out / "demo.png")
    encoded = msgspec.json.encode(data)
    (options.out / "demo.json").write_bytes(msgspec.json.format(encoded, indent=2))
    say(f"plot and figures: {options.out / 'demo.png'}, {options.out / 'demo.json'}")
    if options.json:
        print(encoded.decode())
    return 0 if record.lost == 0 and all(record.refusals.values()) else 1


def _only(registry: Path, file: Path) -> Path:
    """A registry of the demo's models alone."""
    known = ModelRegistry.load(registry)
    write_registry(file, [known.entry(name) for name in known.bases if name in MODELS])
    return file


def show_progress(record: Record, total: int) -> None:
    """One line that is overwritten on a terminal, and one every few seconds elsewhere."""
    done = len(record.outcomes)
    counts = "  ".join(
        f"{c.name} {sum(o.class_name == c.name for o in record.outcomes)}" for c in CLASSES
    )
    running = sum(status.running for status in record.instances.values())
    line = (
        f"demo: {record.duration_s:5.1f} s  sent {record.sent}/{total}  done {done}  "
        f"running {running}  [{counts}]"
    )
    if sys.stderr.isatty():
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
    elif int(record.duration_s * 2) % 10 == 0:
        print(line, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """One line of progress."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
