"""What an application announces to the edge about an answer before the answer begins."""

from collections.abc import Mapping, MutableMapping
from typing import Any

_KEY = "headway.announced"
"""Key of the scope of a request: headers of the event stream that will answer it."""


def expect_announcements(scope: MutableMapping[str, Any]) -> Mapping[str, str]:
    """
    Prepare *scope* for announcements.

    Returns:
        The headers that are announced later; empty until then.
    """
    headers: dict[str, str] = {}
    scope[_KEY] = headers
    return headers


def announce_stream(scope: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """
    Announce to the edge that an event stream with *headers* will answer the request of *scope*, so
    that the edge may begin it while the request waits.
    """
    scope.get(_KEY, {}).update(headers)
