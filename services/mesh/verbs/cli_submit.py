"""`headway submit`: publishes requests over AMQP and prints their answers."""

import math
import sys
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from services.mesh.submit import (
    all_completed,
    call_request,
    is_streamed,
    read_requests,
    submit_all,
    submit_one,
)
from services.mesh.verbs.options import AmqpUrl
from shared.broker.amqp.connection import broker_user
from shared.contracts.base import UnixTime
from shared.contracts.errors import SettingsError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Importance, OnLate, Slo
from shared.contracts.requests import ReplyMode, RequestCompleted, RequestFailed
from shared.producer.producer import Request
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import File, IntegerOption, JsonOption, NumberOption, SecondsOption
from shared.runtime.settings import DEFAULT_AMQP_URL

OF_BODY = ("prompt", "--max-tokens", "--temperature")
"""Arguments that a body for an endpoint contains."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """Options of `submit`."""

    model: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """Name in the registry; required unless --file or --endpoint is given."""
    max_tokens: IntegerOption | None = None
    """Maximum length of the answer, in tokens."""
    temperature: NumberOption | None = None
    """Sampling temperature; 0 is greedy."""
    ttft: SecondsOption | None = None
    """Target: seconds to the first token."""
    tbt: SecondsOption | None = None
    """Target: maximum seconds between two tokens after the first (TBT)."""
    ttlt: SecondsOption | None = None
    """Target: seconds to the whole answer."""
    application: Annotated[str | None, Parameter(metavar="LABEL")] = None
    """Label of requests with similar output lengths."""
    importance: Importance | None = None
    """Importance of the request; affects its lane."""
    ttl: SecondsOption | None = None
    """Seconds after which the request ends without its answer."""
    on_late: OnLate | None = None
    """Serve the request after its deadline, or drop it then."""
    not_before: Annotated[str | None, Parameter(metavar="TIME")] = None
    """Time until which the request is held: Unix seconds, or +SECONDS from now."""
    final: bool = False
    """Deliver only the whole answer, without streaming tokens."""
    endpoint: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Endpoint of the HTTP API, e.g. /v1/chat/completions, for --body."""
    body: Annotated[str | None, Parameter(metavar="JSON")] = None
    """
    Body for --endpoint, or @FILE to read it from a file (@- for standard input); prints the
    response.
    """
    file: Annotated[File | None, Parameter(metavar="JSONL")] = None
    """JSON-lines file with one request body per line; prints the finals as JSON lines."""

    @property
    def of_one_request(self) -> dict[str, object]:
        """Options that describe one request, which requests in a file contain themselves."""
        names = (
            *("model", "max_tokens", "temperature", "ttft", "tbt", "ttlt", "application"),
            *("importance", "ttl", "on_late", "not_before", "endpoint", "body"),
        )
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}


async def submit(
    prompt: Annotated[
        str | None, Parameter(help="Text of the prompt, or - for standard input.")
    ] = None,
    /,
    *,
    options: SubmitOptions = SubmitOptions(),
    is_piped: Annotated[bool, Parameter(name="-", show=False)] = False,
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    json: JsonOption = False,
) -> int:
    """Publish a request over AMQP and print its answer as it arrives."""
    prompt = "-" if is_piped else prompt
    check_submit(prompt, options)
    user_id = broker_user(amqp_url)
    async with broker_factory(amqp_url)("headway-submit") as broker:
        if options.file is not None:
            requests = read_requests(options.file)
            finals = await submit_all(broker, requests, user_id=user_id)
            return EXIT_OK if all_completed(finals) else EXIT_FAILED
        request = _request(prompt, options)
        shows_text = is_streamed(request) and not (options.final or json)
        final = await submit_one(
            broker,
            request,
            reply=ReplyMode.STREAM if shows_text else ReplyMode.FINAL,
            user_id=user_id,
            show=_ignore if json else _show,
        )
    if json:
        print_data(final, as_json=True)
    elif isinstance(final, RequestFailed):
        print(f"\n{final.error.code}: {final.error.message}", file=sys.stderr)
    else:
        print("" if shows_text or not final.response else bytes(final.response).decode())
        print(summary(final), file=sys.stderr)
    return EXIT_FAILED if isinstance(final, RequestFailed) else EXIT_OK


def summary(final: RequestCompleted) -> str:
    """One line about an answer; without a time to the first token if it has no tokens."""
    verdict, usage = final.verdict, final.usage
    first = "" if verdict.ttft_s is None else f"first after {verdict.ttft_s:.3f} s, "
    return (
        f"{final.instance_id}: {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
        f"{first}all after {verdict.ttlt_s or 0:.3f} s, "
        f"SLO {'attained' if verdict.attained else 'missed'}"
    )


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(_text: str) -> None:
    """Print nothing: JSON is printed at the end."""


def _request(prompt: str | None, options: SubmitOptions) -> Request:
    slo = Slo(ttft_s=options.ttft, tbt_s=options.tbt, ttlt_s=options.ttlt)
    not_before = begin_time(options.not_before, SystemClock().now())
    if options.endpoint is not None and options.body is not None:
        return call_request(
            options.endpoint,
            options.body,
            model=options.model,
            application=options.application,
            importance=options.importance,
            slo=None if slo == Slo() else slo,
            ttl_s=options.ttl,
            not_before=not_before,
            on_late=options.on_late,
        )
    if options.model is None or prompt is None:
        raise SettingsError("submit needs --model and a prompt, --endpoint and --body, or --file")
    return InferenceRequest(
        model=options.model,
        prompt=sys.stdin.read().removeprefix("\ufeff") if prompt == "-" else prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        application=options.application,
        importance=options.importance,
        slo=slo,
        ttl_s=options.ttl,
        not_before=not_before,
        on_late=options.on_late,
    )


def check_submit(prompt: str | None, options: SubmitOptions) -> None:
    """
    Reject arguments that would be ignored.

    Raises:
        SettingsError: An argument would be ignored; the message names it.
    """
    values = {"prompt": prompt} | options.of_one_request
    given = [name for name, value in values.items() if value is not None]
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
