"""Log events of modules that also run in programs without structlog."""

import logging
from collections.abc import Mapping


class EventLogger:
    """
    Logs events with fields through the standard library's `logging`.

    Services pass them to structlog (`shared.runtime.logging`); in other programs, the text of a
    record is the event with its fields.

    Args:
        name: Name of the module.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log an event with the exception that is being handled."""
        self._log(logging.ERROR, event, fields, with_exception=True)

    def _log(
        self, level: int, event: str, fields: Mapping[str, object], *, with_exception: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            text = " ".join((event, *(f"{name}={value}" for name, value in fields.items())))
            extra = {"event": event, "fields": fields}
            self._logger.log(level, "%s", text, extra=extra, exc_info=with_exception, stacklevel=3)
