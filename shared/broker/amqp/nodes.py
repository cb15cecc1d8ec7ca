"""The nodes of a broker, as a list of URLs names them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from urllib.parse import SplitResult, urlsplit

from aio_pika.connection import make_url
from aiormq.connection import DEFAULT_PORTS, URL  # type: ignore[attr-defined]

from shared.contracts.errors import SettingsError

UNREADABLE_URL = (
    "the broker's URL cannot be read: it must be amqp://USER:PASSWORD@HOST:PORT/VHOST, with all "
    "characters of USER, PASSWORD and VHOST percent-encoded except letters and digits; URLs of "
    "several nodes are separated by commas"
)
EMPTY_URL = "the broker URL is empty: it must begin with amqp:// or amqps://"
_BETWEEN = re.compile(r"\s*,\s*(?=\w+://)")


@dataclass(frozen=True, slots=True)
class Node:
    """Address of one node of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Nodes:
    """
    The nodes of a broker, in the order in which they are tried.

    Args:
        text: URL of each node, separated by commas; they differ in host and port only.

    Raises:
        SettingsError: A URL cannot be read, or differs from the first in more than host and port.
    """

    def __init__(self, text: str) -> None:
        urls = [_readable(each) for each in urls_of(text)]
        self.login = str(urls[0])
        """URL of the first node, with user, virtual host and options of all."""
        for number, url in enumerate(urls[1:], start=2):
            if _without_address(url) != _without_address(urls[0]):
                raise SettingsError(
                    f"URL {number} of the broker's {len(urls)} differs from the first in more than "
                    "host and port: give all the same scheme, user, password, vhost and options"
                )
        self.all = tuple(
            Node(url.host or "", url.port or DEFAULT_PORTS[url.scheme]) for url in urls
        )
        self._turns: Iterator[Node] = cycle(self.all)

    def next(self) -> Node:
        """The node to try next: each is tried once before any is tried again."""
        return next(self._turns)


def parts_of(url: str) -> SplitResult:
    """
    The parts of a broker's URL, or of the first of several.

    Raises:
        SettingsError: The URL is empty or cannot be read; the message has no password.
    """
    if not url.strip():
        raise SettingsError(EMPTY_URL)
    try:
        return urlsplit(urls_of(url)[0])
    except ValueError:
        raise SettingsError(UNREADABLE_URL) from None


def urls_of(text: str) -> list[str]:
    """The URLs in a list that is separated by commas."""
    return _BETWEEN.split(text.strip())


def _readable(text: str) -> URL:
    try:
        url = make_url(text)
    except ValueError:
        # The text of the error may have the password.
        raise SettingsError(UNREADABLE_URL) from None
    if url.scheme not in DEFAULT_PORTS:
        raise SettingsError("the broker's URL must begin with amqp:// or amqps://")
    if "," in (url.host or ""):
        raise SettingsError(UNREADABLE_URL)
    return url


def _without_address(url: URL) -> URL:
    return url.with_host("node").with_port(None)
