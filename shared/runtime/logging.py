"""Structured logs on stderr: JSON lines, or readable text on a terminal."""

import logging
import sys

import msgspec
import structlog

_encoder = msgspec.json.Encoder(enc_hook=repr)


def _to_json(event: dict[str, object], **_: object) -> bytes:
    return _encoder.encode(event)


class _EventHandler(logging.Handler):
    """Passes the events of `shared.runtime.events` to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        event = getattr(record, "event", record.getMessage())
        structlog.get_logger().log(record.levelno, event, **fields)


def configure_logging(*, level: str, service: str) -> None:
    """
    Set up structlog for this process; every event contains *service*.

    Prompts and generated text are never logged, at any level.
    """
    on_terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            *shared,
            structlog.dev.ConsoleRenderer(),
        ]
        if on_terminal
        else [
            *shared,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr)
        if on_terminal
        else structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)
    own = logging.getLogger("shared")
    own.handlers, own.propagate = [_EventHandler()], False
    own.setLevel(number)
    # Headway's event `broker.lost` covers reconnects; the library's tracebacks add nothing.
    logging.getLogger("aio_pika").setLevel(logging.CRITICAL)
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)
