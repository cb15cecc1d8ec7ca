"""Arguments of `headway`."""

import argparse
from pathlib import Path

from services.mesh.spec import EMBEDDED
from shared.contracts.errors import SettingsError
from shared.runtime.arguments import HelpFormatter

OF_ONE_REQUEST = (
    "prompt",
    "--model",
    "--max-tokens",
    "--temperature",
    "--ttft",
    "--tbt",
    "--ttlt",
    "--application",
    "--importance",
)
"""What `submit` takes to make a request of; those of a file bring their own."""


def parser(*, amqp_url: str, registry: Path | None) -> argparse.ArgumentParser:
    """
    The command line.

    Args:
        amqp_url: Default broker.
        registry: Default model registry.
    """
    root = argparse.ArgumentParser(
        prog="headway",
        description="SLO-oriented serving mesh for LLMs over RabbitMQ.",
        epilog="Each service has a command of its own, too: headway-gateway, headway-planner, "
        "headway-estimator, headway-agent. Exit codes: 0 ok, 1 failed, 2 usage or settings, "
        "3 broker unreachable.",
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str, *, json: bool = True) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, formatter_class=HelpFormatter)
        # Its value may have a password, which help must not print.
        made.add_argument(
            "--amqp-url",
            default=amqp_url,
            metavar="URL",
            help="the mesh's broker; by default that of HEADWAY_AMQP_URL, else the local one",
        )
        if json:
            made.add_argument("--json", action="store_true", help="machine-readable output")
        return made

    up = verb("up", "run a whole mesh on this machine until Ctrl-C", json=False)
    _registry(up, registry, "models to serve; without one, tiny models are made in --log-dir")
    _up(up)
    _submit(verb("submit", "publish a request over AMQP and print its answer as it comes"))
    top = verb("top", "follow instances, their work and SLO attainment")
    top.add_argument("--once", action="store_true", help="one look instead of a live view")
    queues = verb("queues", "print how many requests wait in each queue, lane and inbox")
    _registry(queues, registry, "models whose lanes are counted; it or HEADWAY_REGISTRY is needed")
    _dead_letter(verb("dead-letter", "look into, requeue or drop what could not be served"))
    verbs.add_parser("plan", help="show, explain or compare plans, as headway-planner plan does")
    verbs.add_parser("profile", help="measure an engine, for the simulator")
    verbs.add_parser("simulate", help="how many GPUs a workload needs, and who misses its SLO")
    return root


def _registry(verb: argparse.ArgumentParser, default: Path | None, text: str) -> None:
    verb.add_argument("--registry", type=Path, default=default, metavar="FILE", help=text)


def _up(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "--broker",
        metavar="URL",
        help=f"AMQP URL, by default that of --amqp-url; or `{EMBEDDED}`: everything in one "
        "process, nothing to install",
    )
    up.add_argument(
        "--agents", type=int, default=2, metavar="N", help="engines, each with its agent"
    )
    up.add_argument(
        "--engine", default="simulated", choices=("simulated", "vllm"), help="of every agent"
    )
    up.add_argument(
        "--groupers", type=int, default=1, metavar="N", help="they share the requests that come"
    )
    up.add_argument(
        "--leaders", type=int, default=1, metavar="N", help="one leads, others stand by"
    )
    up.add_argument("--port", type=int, default=8000, help="of the gateway, on this machine alone")
    up.add_argument(
        "--log-dir",
        type=Path,
        default=Path(".headway/up"),
        metavar="DIR",
        help="logs and settings; without --registry, tiny models, too",
    )


def _submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("prompt", nargs="?", help="text, or - for standard input")
    submit.add_argument("--model", help="as in the registry; needed unless --file is given")
    submit.add_argument("--max-tokens", type=int, metavar="N", help="of the answer, at most")
    submit.add_argument("--temperature", type=float, metavar="T", help="of sampling; 0 is greedy")
    submit.add_argument("--ttft", type=float, metavar="SECONDS", help="first token within")
    submit.add_argument("--tbt", type=float, metavar="SECONDS", help="pace of later tokens")
    submit.add_argument("--ttlt", type=float, metavar="SECONDS", help="whole answer within")
    submit.add_argument("--application", help="groups requests of like output length")
    submit.add_argument("--importance", choices=("low", "high"), help="which lane it waits in")
    submit.add_argument("--final", action="store_true", help="no tokens, only the whole answer")
    submit.add_argument(
        "--file",
        type=Path,
        metavar="JSONL",
        help="many requests, one body a line, which says all of its request; prints their "
        "finals as JSON lines",
    )


def check_submit(options: argparse.Namespace) -> None:
    """
    Refuse what would be ignored.

    Raises:
        SettingsError: Names the argument.
    """
    if options.file is None:
        return
    for argument in OF_ONE_REQUEST:
        if getattr(options, argument.removeprefix("--").replace("-", "_")) is not None:
            raise SettingsError(
                f"{argument} has no effect on the requests of --file: each line has its own"
            )


def _dead_letter(dead_letter: argparse.ArgumentParser) -> None:
    dead_letter.add_argument(
        "action", choices=("peek", "requeue", "purge"), help="look, publish again, or delete"
    )
    dead_letter.add_argument(
        "--limit", type=int, metavar="N", help="look at the N oldest only (50; purge: at all)"
    )
    dead_letter.add_argument(
        "--id", help="only the request with this id, if it is among the N oldest (of 50)"
    )
    dead_letter.add_argument(
        "--yes", action="store_true", help="needed for purge: what it drops is gone for good"
    )
