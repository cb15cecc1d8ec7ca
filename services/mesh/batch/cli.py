"""`headway batch`: submits, shows, waits for and cancels batches."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from services.mesh.batch.client import BatchClient, GatewayError, batch_client
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.errors import ContractError, SettingsError
from shared.runtime.arguments import HelpFormatter, TextHelpFormatter
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE

Options = argparse.Namespace
DEFAULT_URL = "http://127.0.0.1:8000"
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
POLL_S: Seconds = 1.0
PATIENCE_S: Seconds = 120.0
"""Time for which a wait continues while the gateway does not answer."""
FIRST_LINE_BYTES = 2**20
DESCRIPTION = """\
Batches of requests over the HTTP interface of a gateway. A file has one request in a line, as for
OpenAI's Batch API and for vLLM's `run-batch`:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ...}}"""
EPILOG = """\
examples:
  headway batch submit lines.jsonl                    prints the id
  headway batch submit lines.jsonl --window 2h --wait -o results.jsonl
  headway batch status batch_019...
  headway batch results batch_019... -o results.jsonl --errors errors.jsonl

exit codes: 0 ok, 1 failed, or the batch is not completed or has failed lines, 2 usage"""


def parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    root = argparse.ArgumentParser(
        prog="headway batch",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=TextHelpFormatter,
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, formatter_class=HelpFormatter)
        made.add_argument(
            "--url",
            default=os.environ.get("HEADWAY_URL", DEFAULT_URL),
            metavar="URL",
            help=f"address of the gateway; default: HEADWAY_URL, else {DEFAULT_URL}",
        )
        made.add_argument(
            "--key",
            default=os.environ.get("HEADWAY_API_KEY"),
            metavar="KEY",
            help="API key; default: HEADWAY_API_KEY",
        )
        made.add_argument("--json", action="store_true", help="machine-readable output")
        return made

    def waiting(made: argparse.ArgumentParser) -> None:
        made.add_argument("--wait", action="store_true", help="wait until the batch has ended")

    def results(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help="file for the results; without --errors it also gets the lines that failed",
        )
        made.add_argument(
            "--errors", type=Path, metavar="FILE", help="file for the lines that failed"
        )

    submit = verb("submit", "upload a file of requests and create a batch")
    submit.add_argument("file", type=Path, metavar="FILE", help="JSON lines")
    submit.add_argument(
        "--endpoint", metavar="PATH", help="endpoint; default: the url of the first line"
    )
    submit.add_argument(
        "--window", default="24h", metavar="TIME", help="completion window, e.g. 90s, 30m or 2h"
    )
    submit.add_argument(
        "--metadata",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="metadata of the batch; may be repeated",
    )
    waiting(submit)
    results(submit)
    for name, text in (
        ("status", "show how far a batch is"),
        ("results", "write the results of a batch; to standard output without --output"),
        ("cancel", "cancel a batch; what has ended is kept"),
    ):
        made = verb(name, text)
        made.add_argument("id", metavar="ID", help="id of the batch")
        waiting(made)
        if name == "results":
            results(made)
    listed = verb("list", "list the newest batches")
    listed.add_argument("--limit", type=int, default=20, help="number of batches")
    return root


async def submit(client: BatchClient, options: Options) -> int:
    """Upload a file and create a batch."""
    if options.output is not None and not options.wait:
        raise SettingsError("--output needs --wait; or use `headway batch results` later")
    endpoint = options.endpoint or await asyncio.to_thread(endpoint_of, options.file)
    batch = await client.create(
        {
            "input_file_id": await client.upload(options.file),
            "endpoint": endpoint,
            "completion_window": options.window,
            "metadata": _metadata(options.metadata) or None,
        }
    )
    if not options.wait:
        return _show(batch, options, text=str(batch["id"]))
    print(f"{batch['id']} is created", file=sys.stderr)
    batch = await _ended(client, batch, options)
    if options.output is not None:
        await _write(client, batch, options)
    return _show(batch, options, is_judged=True)


async def status(client: BatchClient, options: Options) -> int:
    """Show a batch."""
    batch = await client.get(options.id)
    if options.wait:
        batch = await _ended(client, batch, options)
    return _show(batch, options, is_judged=options.wait)


async def results(client: BatchClient, options: Options) -> int:
    """Write the results of a batch."""
    batch = await client.get(options.id)
    if options.wait:
        batch = await _ended(client, batch, options)
    if batch["status"] in OPEN:
        raise GatewayError(
            f"the batch is {batch['status']} and has no results yet; --wait waits for them"
        )
    await _write(client, batch, options)
    print(summary(batch, SystemClock().now()), file=sys.stderr)
    return EXIT_OK if _is_complete(batch) else EXIT_FAILED


async def cancel(client: BatchClient, options: Options) -> int:
    """Cancel a batch."""
    batch = await client.cancel(options.id)
    if options.wait:
        batch = await _ended(client, batch, options)
    return _show(batch, options)


async def list_batches(client: BatchClient, options: Options) -> int:
    """List batches."""
    batches = await client.list(options.limit)
    if options.json:
        print_data(batches, as_json=True)
    else:
        now = SystemClock().now()
        for batch in batches:
            print(summary(batch, now))
    return EXIT_OK


def endpoint_of(file: Path) -> str:
    """
    The `url` of the first line of a file of requests.

    Raises:
        ContractError: The file cannot be read, or its first line has no `url`.
    """
    try:
        with file.open("rb") as lines:
            first = next(
                (
                    line
                    for line in iter(lambda: lines.readline(FIRST_LINE_BYTES), b"")
                    if line.strip()
                ),
                b"",
            )
    except OSError as error:
        raise ContractError(f"cannot read {file}: {error}", param="FILE") from error
    try:
        return msgspec.json.decode(first, type=_Addressed).url
    except msgspec.DecodeError as error:
        raise ContractError(
            f"{file}: the first line has no url ({error}); give --endpoint", param="FILE"
        ) from error


class _Addressed(msgspec.Struct):
    url: str


def summary(batch: dict[str, Any], now: UnixTime) -> str:
    """One line about a batch."""
    counts = batch["request_counts"]
    text = (
        f"{batch['id']}  {batch['status']}  {counts['completed']} completed, {counts['failed']} "
        f"failed of {counts['total']}"
    )
    if batch["status"] not in OPEN:
        reasons = [each["message"] for each in (batch.get("errors") or {}).get("data", [])]
        return "; ".join([text, *reasons])
    expected_at = batch["headway"]["expected_at"]
    if expected_at is not None:
        text += f", expected in {max(0.0, expected_at - now):.0f} s"
    end = datetime.fromtimestamp(batch["expires_at"], UTC)
    return f"{text}, window until {end.isoformat(sep=' ', timespec='seconds')}"


async def _ended(client: BatchClient, batch: dict[str, Any], options: Options) -> dict[str, Any]:
    """The batch when it has ended; the way there is shown on standard error."""
    loop = asyncio.get_running_loop()
    heard_at, shown = loop.time(), ""
    while batch["status"] in OPEN:
        await asyncio.sleep(POLL_S)
        try:
            batch = await client.get(batch["id"])
        except GatewayError as error:
            if error.status not in (0, 503) or loop.time() > heard_at + PATIENCE_S:
                raise
            continue
        heard_at = loop.time()
        line = summary(batch, SystemClock().now())
        if line != shown and not options.json:
            print(line, file=sys.stderr)
            shown = line
    return batch


async def _write(client: BatchClient, batch: dict[str, Any], options: Options) -> None:
    with ExitStack() as stack:
        out = _opened(options.output, stack) or sys.stdout.buffer
        errors = _opened(options.errors, stack) or out
        for name, target in (("output_file_id", out), ("error_file_id", errors)):
            if batch[name] is not None:
                await client.download(batch[name], target)


def _opened(path: Path | None, stack: ExitStack) -> IO[bytes] | None:
    if path is None:
        return None
    try:
        return stack.enter_context(path.open("wb"))
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error}") from error


def _metadata(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise SettingsError("--metadata must be KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _show(
    batch: dict[str, Any], options: Options, *, text: str | None = None, is_judged: bool = False
) -> int:
    if options.json:
        print_data(batch, as_json=True)
    else:
        print(text or summary(batch, SystemClock().now()))
    return EXIT_OK if not is_judged or _is_complete(batch) else EXIT_FAILED


def _is_complete(batch: dict[str, Any]) -> bool:
    return bool(batch["status"] == "completed" and not batch["request_counts"]["failed"])


VERBS: dict[str, Callable[[BatchClient, Options], Coroutine[Any, Any, int]]] = {
    "submit": submit,
    "status": status,
    "results": results,
    "cancel": cancel,
    "list": list_batches,
}


def main(argv: Sequence[str]) -> int:
    """Run one verb with the arguments *argv*; return the exit code."""
    options = parser().parse_args(argv)
    try:
        return asyncio.run(_run(options))
    except (SettingsError, ContractError) as error:
        print(f"headway batch: {error}", file=sys.stderr)
        return EXIT_USAGE
    except GatewayError as error:
        print(f"headway batch: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _run(options: Options) -> int:
    async with batch_client(options.url, options.key) as client:
        return await VERBS[options.verb](client, options)
