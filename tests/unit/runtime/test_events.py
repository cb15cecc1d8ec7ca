"""Events of modules without structlog are text, or events of the service."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from shared.runtime.events import EventLogger
from shared.runtime.logging import configure_logging


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """Give the project's logger its initial state, and restore it after `configure_logging`."""
    own = logging.getLogger("shared")
    before = own.handlers, own.propagate, own.level
    own.handlers, own.propagate = [], True
    own.setLevel(logging.NOTSET)
    yield
    own.handlers, own.propagate, own.level = before


def test_text_of_an_event_has_its_fields(caplog: pytest.LogCaptureFixture):
    EventLogger("shared.test").warning("broker.lost", connection="app publish")

    assert caplog.messages == ["broker.lost connection=app publish"]


def test_a_service_logs_the_event_with_its_fields_and_context(
    capfdbinary: pytest.CaptureFixture[bytes],
):
    configure_logging(level="info", service="agent")
    log = EventLogger("shared.test")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.debug("message.dropped")
        try:
            int("no")
        except ValueError:
            log.exception("handler.raised", queue="q", errors=["a"])

    (line,) = capfdbinary.readouterr().err.splitlines()
    event = json.loads(line)
    assert event.pop("timestamp")
    assert "ValueError: invalid literal" in event.pop("exception")
    assert event == {
        "event": "handler.raised",
        "level": "error",
        "service": "agent",
        "request_id": "r1",
        "queue": "q",
        "errors": ["a"],
    }
