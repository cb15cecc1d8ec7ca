"""Arguments of the command `headway`."""

import argparse
import math
from pathlib import Path

from services.mesh.spec import EMBEDDED
from shared.contracts.base import UnixTime
from shared.contracts.errors import SettingsError
from shared.contracts.qos import OnLate
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
    "--ttl",
    "--on-late",
    "--not-before",
    "--endpoint",
    "--body",
)
"""Arguments of `submit` that describe one request; requests in a file contain these values."""
OF_BODY = ("prompt", "--max-tokens", "--temperature")
"""Arguments of `submit` that a body for an endpoint contains."""


def parser(*, amqp_url: str, registry: Path | None) -> argparse.ArgumentParser:
    """
    Create the parser of the command line.

    Args:
        amqp_url: URL of the default broker.
        registry: Path of the default model registry.
    """
    root = argparse.ArgumentParser(
        prog="headway",
        description="SLO-oriented serving mesh for LLMs over RabbitMQ.",
        epilog="Each service also has its own command: headway-gateway, headway-planner, "
        "headway-estimator, headway-agent. Exit codes: 0 ok, 1 failed, 2 usage or "
        "settings, 3 broker unreachable.",
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str, *, json: bool = True) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, formatter_class=HelpFormatter)
        # Do not show the default in the help: the URL may contain a password.
        made.add_argument(
            "--amqp-url",
            default=amqp_url,
            metavar="URL",
            help="URL of the mesh's broker; default: HEADWAY_AMQP_URL, else the local broker",
        )
        if json:
            made.add_argument("--json", action="store_true", help="machine-readable output")
        return made

    up = verb("up", "run a whole mesh on this machine until Ctrl-C", json=False)
    _served_models(up, registry)
    _up(up)
    _submit(verb("submit", "publish a request over AMQP and print its answer as it arrives"))
    top = verb("top", "show instances, their work and SLO attainment continuously")
    top.add_argument(
        "--once", action="store_true", help=("print one snapshot instead of a live view")
    )
    queues = verb("queues", ("print the number of waiting requests in each queue, lane and inbox"))
    _registry(
        queues,
        registry,
        ("models whose lanes are counted; required unless HEADWAY_REGISTRY is set"),
    )
    _dead_letter(verb("dead-letter", "list, requeue or delete dead-lettered requests"))
    usage = verb("usage", "print what finished requests of tenants have used")
    usage.add_argument("--tenant", metavar="NAME", help="only this tenant; default: all")
    usage.add_argument(
        "--since",
        default="30d",
        metavar="TIME",
        help="first hour: a date, Unix seconds, or a duration before now (default: 30d)",
    )
    usage.add_argument("--until", metavar="TIME", help="end; default: now")
    usage.add_argument(
        "--by",
        action="append",
        choices=["hour", "model", "class"],
        help="one row for each; may be repeated",
    )
    verbs.add_parser("keys", help="create, list, rotate and revoke API keys")
    verbs.add_parser("batch", help="submit, show and cancel batches of requests over HTTP")
    verb("doctor", "check the broker: rights, limits, differing objects, alarms and services")
    verbs.add_parser("models", help="add, list, check and remove models of a registry file")
    verbs.add_parser("store", help="migrate and examine the store of files")
    verbs.add_parser("plan", help=("show, explain or compare plans; same as headway-planner plan"))
    verbs.add_parser("profile", help="measure an engine, and write a profile for the simulator")
    verbs.add_parser(
        "simulate",
        help=("predict the number of GPUs that a workload needs, and its SLO violations"),
    )
    return root


def _served_models(up: argparse.ArgumentParser, default: Path | None) -> None:
    """Arguments that select the models of `up`; without them, tiny models are created."""
    models = up.add_mutually_exclusive_group()
    _registry(models, default, "models to serve; without it, tiny models are created in --log-dir")
    models.add_argument(
        "--model",
        action="append",
        default=[],
        dest="models",
        metavar="MODEL[=NAME]",
        help="model to serve: a directory, or an id org/name[@revision] of the Hugging Face hub; "
        "NAME is the name in requests; may be repeated. The registry is written to --log-dir; "
        "`headway models` changes it while the mesh runs",
    )
    up.add_argument(
        "--adapter",
        action="append",
        default=[],
        dest="adapters",
        metavar="BASE=DIR[=NAME]",
        help="LoRA adapter of the --model with the name BASE; may be repeated",
    )
    up.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="limit of prompt plus answer of each --model, if it is less than the model's own",
    )


def _registry(verb: argparse._ActionsContainer, default: Path | None, text: str) -> None:
    verb.add_argument("--registry", type=Path, default=default, metavar="FILE", help=text)


def _up(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "--broker",
        metavar="URL",
        help=f"AMQP URL (default: value of --amqp-url); with `{EMBEDDED}` all services run in one "
        "process without an external broker",
    )
    up.add_argument(
        "--agents",
        type=int,
        metavar="N",
        help="number of engines, each with its agent; default: 2, or 0 with --attach",
    )
    up.add_argument(
        "--attach",
        action="append",
        default=[],
        metavar="[NAME=]URL[#MODEL]",
        help="serve with servers that others run, e.g. http://models.example:8000; each address of "
        "the name is an instance. Also file:PATH with one address per line, "
        "kubernetes://NAMESPACE/SERVICE?port=PORT, and router+URL for a router. NAME is the "
        "model's name in the mesh, MODEL its name at the server. Repeatable. "
        "HEADWAY_ATTACH_API_KEY has the servers' key",
    )
    up.add_argument(
        "--engine",
        default="simulated",
        choices=("simulated", "vllm"),
        help="engine backend of every agent",
    )
    up.add_argument(
        "--tenants", type=Path, metavar="FILE", help="policies of tenants; default: HEADWAY_TENANTS"
    )
    up.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="API keys made by `headway keys`; default: HEADWAY_GATEWAY_KEYS_FILE",
    )
    up.add_argument(
        "--groupers",
        type=int,
        default=1,
        metavar="N",
        help=("number of groupers, which share incoming requests"),
    )
    up.add_argument(
        "--leaders",
        type=int,
        default=1,
        metavar="N",
        help=("number of leaders: one is active, and another replaces a failed leader"),
    )
    up.add_argument(
        "--port",
        type=int,
        default=8000,
        help=("port of the gateway, which listens on this machine only"),
    )
    up.add_argument(
        "--front",
        default="auto",
        choices=("auto", "light", "vllm"),
        help="HTTP application of the gateway: `vllm` has all endpoints and fields of `vllm "
        "serve`, `light` serves text and needs no vLLM; default: `vllm` where it is installed and "
        "a model has weights",
    )
    up.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="directory of the store: files and what else outlives a connection; default: "
        "HEADWAY_STORE_DATA_DIR, else .headway/data. HEADWAY_STORE_URL and HEADWAY_STORE_FILES "
        "select another place",
    )
    up.add_argument(
        "--no-store",
        action="store_true",
        help="keep nothing: the Files API answers with status 501",
    )
    up.add_argument(
        "--log-dir",
        type=Path,
        default=Path(".headway/up"),
        metavar="DIR",
        help="directory for logs and settings, and for tiny models if --registry is not given",
    )


def _submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("prompt", nargs="?", help=("text of the prompt, or - for standard input"))
    submit.add_argument(
        "--model",
        help="name in the registry; required unless --file or --endpoint is given",
    )
    submit.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum length of the answer, in tokens"
    )
    submit.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy"
    )
    submit.add_argument(
        "--ttft", type=float, metavar="SECONDS", help="target: seconds to the first token"
    )
    submit.add_argument(
        "--tbt",
        type=float,
        metavar="SECONDS",
        help="target: maximum seconds between two tokens after the first (TBT)",
    )
    submit.add_argument(
        "--ttlt", type=float, metavar="SECONDS", help="target: seconds to the whole answer"
    )
    submit.add_argument("--application", help="label of requests with similar output lengths")
    submit.add_argument(
        "--importance", choices=("low", "high"), help="importance of the request; affects its lane"
    )
    submit.add_argument(
        "--ttl",
        type=float,
        metavar="SECONDS",
        help="seconds after which the request ends without its answer",
    )
    submit.add_argument(
        "--on-late",
        choices=tuple(each.value for each in OnLate),
        help="serve the request after its deadline, or drop it then",
    )
    submit.add_argument(
        "--not-before",
        metavar="TIME",
        help="time until which the request is held: Unix seconds, or +SECONDS from now",
    )
    submit.add_argument(
        "--final",
        action="store_true",
        help=("deliver only the whole answer, without streaming tokens"),
    )
    submit.add_argument(
        "--endpoint",
        metavar="PATH",
        help="endpoint of the HTTP API, e.g. /v1/chat/completions, for --body",
    )
    submit.add_argument(
        "--body",
        metavar="JSON",
        help="body for --endpoint, or @FILE to read it from a file (@- for standard input); "
        "prints the response",
    )
    submit.add_argument(
        "--file",
        type=Path,
        metavar="JSONL",
        help="JSON-lines file with one request body per line; prints the finals as JSON lines",
    )


def check_submit(options: argparse.Namespace) -> None:
    """
    Reject arguments that would be ignored.

    Raises:
        SettingsError: An argument would be ignored; the message names it.
    """
    given = [name for name in OF_ONE_REQUEST if _value(options, name) is not None]
    if options.file is not None and given:
        raise SettingsError(
            f"{given[0]} has no effect on the requests of --file: set it in each line"
        )
    if (options.endpoint is None) != (options.body is None):
        raise SettingsError("--endpoint and --body need each other")
    of_body = [name for name in OF_BODY if name in given]
    if options.endpoint is not None and of_body:
        raise SettingsError(f"{of_body[0]} has no effect with --endpoint: set it in --body")


def begin_time(text: str | None, now: UnixTime) -> UnixTime | None:
    """
    The time of `--not-before`.

    Raises:
        SettingsError: The text is neither a Unix time nor a number of seconds after a plus sign.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise SettingsError(f"--not-before is {text!r}; it must be Unix seconds, or +SECONDS")
    return now + seconds if text.startswith("+") else seconds


def _value(options: argparse.Namespace, argument: str) -> object:
    return getattr(options, argument.removeprefix("--").replace("-", "_"))


def _dead_letter(dead_letter: argparse.ArgumentParser) -> None:
    dead_letter.add_argument(
        "action",
        choices=("peek", "requeue", "purge"),
        help="list the dead letters, publish them again, or delete them",
    )
    dead_letter.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=("read only the N oldest dead letters (default: 50; purge: all)"),
    )
    dead_letter.add_argument(
        "--id", help=("only the request with this id, if it is among the N oldest (default: 50)")
    )
    dead_letter.add_argument(
        "--yes", action="store_true", help="required for purge, which deletes permanently"
    )
