"""Arguments of `headway`."""

import argparse
from pathlib import Path

from services.mesh.spec import EMBEDDED


def parser(*, amqp_url: str, registry: Path | None) -> argparse.ArgumentParser:
    """
    The command line.

    Args:
        amqp_url: Default broker.
        registry: Default model registry.
    """
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--amqp-url", default=amqp_url, metavar="URL", help="the mesh's broker")
    common.add_argument("--registry", type=Path, default=registry, metavar="FILE")
    common.add_argument("--json", action="store_true", help="machine-readable output")
    root = argparse.ArgumentParser(
        prog="headway",
        description="SLO-oriented serving mesh for LLMs over RabbitMQ.",
        epilog="Each service has a command of its own, too: headway-gateway, headway-planner, "
        "headway-estimator, headway-agent. Exit codes: 0 ok, 1 failed, 2 usage or settings, "
        "3 broker unreachable.",
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text, parents=[common])

    _up(verb("up", "run a whole mesh on this machine until Ctrl-C"))
    _submit(verb("submit", "publish a request over AMQP and print its answer as it comes"))
    top = verb("top", "follow instances, their work and SLO attainment")
    top.add_argument("--once", action="store_true", help="one look instead of a live view")
    verb("queues", "print how many requests wait in each queue and lane")
    _dead_letter(verb("dead-letter", "look into, requeue or drop what could not be served"))
    verbs.add_parser("plan", help="show, explain or compare plans, as headway-planner plan does")
    verbs.add_parser("profile", help="measure an engine, for the simulator")
    verbs.add_parser("simulate", help="how many GPUs a workload needs, and who misses its SLO")
    return root


def _up(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "--broker",
        metavar="URL",
        help=f"AMQP URL, by default that of --amqp-url; or `{EMBEDDED}`: everything in one "
        "process, nothing to install",
    )
    up.add_argument("--agents", type=int, default=2, metavar="N")
    up.add_argument("--engine", default="simulated", choices=("simulated", "vllm"))
    up.add_argument("--groupers", type=int, default=1, metavar="N")
    up.add_argument(
        "--leaders", type=int, default=1, metavar="N", help="one leads, others stand by"
    )
    up.add_argument("--port", type=int, default=8000, help="of the gateway")
    up.add_argument(
        "--log-dir",
        type=Path,
        default=Path(".headway/up"),
        help="logs and settings; without --registry, tiny models, too",
    )


def _submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("prompt", nargs="?", help="text, or - for standard input")
    submit.add_argument("--model")
    submit.add_argument("--max-tokens", type=int, metavar="N")
    submit.add_argument("--temperature", type=float, metavar="T")
    submit.add_argument("--ttft", type=float, metavar="SECONDS", help="first token within")
    submit.add_argument("--tbt", type=float, metavar="SECONDS", help="pace of later tokens")
    submit.add_argument("--ttlt", type=float, metavar="SECONDS", help="whole answer within")
    submit.add_argument("--application", help="groups requests of like output length")
    submit.add_argument("--importance", choices=("low", "high"))
    submit.add_argument("--final", action="store_true", help="no tokens, only the whole answer")
    submit.add_argument(
        "--file",
        type=Path,
        metavar="JSONL",
        help="many requests, one body a line; prints their finals as JSON lines",
    )


def _dead_letter(dead_letter: argparse.ArgumentParser) -> None:
    dead_letter.add_argument("action", choices=("peek", "requeue", "purge"))
    dead_letter.add_argument("--limit", type=int, default=50, metavar="N")
    dead_letter.add_argument("--id", help="only the request with this id")
    dead_letter.add_argument("--yes", action="store_true", help="purge without asking")
