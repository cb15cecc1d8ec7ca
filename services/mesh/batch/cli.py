"""`headway batch`: submits, shows, waits for and cancels batches."""

import asyncio
import sys
from codecs import BOM_UTF8
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
from cyclopts import Parameter

from services.mesh.batch.client import BatchClient, GatewayError, batch_client
from services.mesh.verbs.options import DEFAULT_GATEWAY
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.errors import ContractError, SettingsError
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import File, JsonOption, whole
from shared.runtime.program import commands

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
POLL_S: Seconds = 1.0
PATIENCE_S: Seconds = 120.0
"""Time for which a wait continues while the gateway does not answer."""
FIRST_LINE_BYTES = 2**20
BATCH = commands(
    "batch",
    "Submit, show and cancel batches of requests over HTTP.",
    examples="""\
A file has one request in a line, as for OpenAI's Batch API and for vLLM's
`run-batch`:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": ...}}

examples:
  headway batch submit lines.jsonl         prints the id
  headway batch submit lines.jsonl --window 2h --wait -o results.jsonl
  headway batch status batch_019...
  headway batch results batch_019... -o results.jsonl --errors errors.jsonl

exit codes: 0 ok, 1 failed, or the batch is not completed or has failed lines,
2 usage""",
)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The gateway, and how batches are printed."""

    url: Annotated[
        str,
        Parameter(
            env_var="HEADWAY_URL", show_env_var=False, show_default=False, metavar="URL",
            help=f"Address of the gateway; default: HEADWAY_URL, else {DEFAULT_GATEWAY}.",
        ),
    ] = DEFAULT_GATEWAY  # fmt: skip
    key: Annotated[
        str | None,
        Parameter(
            env_var="HEADWAY_API_KEY", show_env_var=False, metavar="KEY",
            help="API key; default: HEADWAY_API_KEY.",
        ),
    ] = None  # fmt: skip
    json: JsonOption = False


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files for the answers."""

    output: Annotated[File | None, Parameter(name=("--output", "-o"))] = None
    """File for the results; without --errors it also gets the lines that failed."""
    errors: File | None = None
    """File for the lines that failed."""


GATEWAY, NO_FILES = Gateway(), Files()
BatchId = Annotated[str, Parameter(name="id", help="Id of the batch.")]
Wait = Annotated[bool, Parameter(name="--wait", help="Wait until the batch has ended.")]


def _metadata(_type: Any, texts: tuple[str, ...]) -> None:
    for text in texts:
        key, equals, _ = text.partition("=")
        if not key or not equals:
            raise ValueError("must be KEY=VALUE")


@BATCH.command
async def submit(
    file: Annotated[File, Parameter(help="JSON lines.")],
    /,
    *,
    endpoint: Annotated[str | None, Parameter(metavar="PATH")] = None,
    window: Annotated[str, Parameter(metavar="TIME")] = "24h",
    metadata: Annotated[tuple[str, ...], Parameter(metavar="KEY=VALUE", validator=_metadata)] = (),
    wait: Wait = False,
    files: Files = NO_FILES,
    gateway: Gateway = GATEWAY,
) -> int:
    """
    Upload a file of requests and create a batch.

    Args:
        endpoint: Endpoint; default: the url of the first line.
        window: Completion window, e.g. 90s, 30m or 2h.
        metadata: Metadata of the batch; may be repeated.

    Raises:
        SettingsError: There is a file for results that nothing waits for, or only one for errors.
    """
    if files.output is not None and not wait:
        raise SettingsError("--output needs --wait; or use `headway batch results` later")
    if files.errors is not None and files.output is None:
        raise SettingsError("--errors needs --output, for the results")
    # Before the upload, since the file would stay at the gateway if its endpoint is unknown.
    endpoint = endpoint or await asyncio.to_thread(endpoint_of, file)
    async with batch_client(gateway.url, gateway.key) as client:
        batch = await client.create(
            {
                "input_file_id": await client.upload(file),
                "endpoint": endpoint,
                "completion_window": window,
                "metadata": {
                    key: value for key, _, value in (each.partition("=") for each in metadata)
                }
                or None,
            }
        )
        if not wait:
            return _show(batch, gateway, text=str(batch["id"]))
        print(f"{batch['id']} is created", file=sys.stderr)
        batch = await _ended(client, batch, gateway)
        if files.output is not None:
            await _write(client, batch, files)
    return _show(batch, gateway, is_judged=True)


@BATCH.command
async def status(batch_id: BatchId, /, *, wait: Wait = False, gateway: Gateway = GATEWAY) -> int:
    """Show how far a batch is."""
    async with batch_client(gateway.url, gateway.key) as client:
        batch = await client.get(batch_id)
        if wait:
            batch = await _ended(client, batch, gateway)
    return _show(batch, gateway, is_judged=wait)


@BATCH.command
async def results(
    batch_id: BatchId,
    /,
    *,
    wait: Wait = False,
    files: Files = NO_FILES,
    gateway: Gateway = GATEWAY,
) -> int:
    """
    Write the results of a batch; to standard output without --output.

    Raises:
        GatewayError: The batch has no results yet.
    """
    async with batch_client(gateway.url, gateway.key) as client:
        batch = await client.get(batch_id)
        if wait:
            batch = await _ended(client, batch, gateway)
        if batch["status"] in OPEN:
            raise GatewayError(
                f"the batch is {batch['status']} and has no results yet; --wait waits for them"
            )
        await _write(client, batch, files)
    print(summary(batch, SystemClock().now()), file=sys.stderr)
    return EXIT_OK if _is_complete(batch) else EXIT_FAILED


@BATCH.command
async def cancel(batch_id: BatchId, /, *, wait: Wait = False, gateway: Gateway = GATEWAY) -> int:
    """Cancel a batch; what has ended is kept."""
    async with batch_client(gateway.url, gateway.key) as client:
        batch = await client.cancel(batch_id)
        if wait:
            batch = await _ended(client, batch, gateway)
    return _show(batch, gateway)


@BATCH.command(name="list")
async def list_batches(*, limit: Annotated[int, whole()] = 20, gateway: Gateway = GATEWAY) -> int:
    """
    List the newest batches.

    Args:
        limit: Number of batches.
    """
    async with batch_client(gateway.url, gateway.key) as client:
        batches = await client.list(limit)
    if gateway.json:
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
        return msgspec.json.decode(first.removeprefix(BOM_UTF8), type=_Addressed).url
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


async def _ended(client: BatchClient, batch: dict[str, Any], gateway: Gateway) -> dict[str, Any]:
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
        if line != shown and not gateway.json:
            print(line, file=sys.stderr)
            shown = line
    return batch


async def _write(client: BatchClient, batch: dict[str, Any], files: Files) -> None:
    with ExitStack() as stack:
        out = _opened(files.output, stack) or sys.stdout.buffer
        errors = _opened(files.errors, stack) or out
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


def _show(
    batch: dict[str, Any], gateway: Gateway, *, text: str | None = None, is_judged: bool = False
) -> int:
    if gateway.json:
        print_data(batch, as_json=True)
    else:
        print(text or summary(batch, SystemClock().now()))
    return EXIT_OK if not is_judged or _is_complete(batch) else EXIT_FAILED


def _is_complete(batch: dict[str, Any]) -> bool:
    return bool(batch["status"] == "completed" and not batch["request_counts"]["failed"])
