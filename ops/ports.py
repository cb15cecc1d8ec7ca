"""Ports of this machine for servers that start later."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 20_000, 32_000
"""
Below the ports that Linux gives to outgoing connections: such a connection could take a port before
the server that needs it has started.
"""
_LATEST = Path(tempfile.gettempdir()) / f"headway-ports-{os.getuid()}"
"""
File with the port that was returned last, for all processes of this user: each port is returned
once before any is returned again, so that two processes get different ports although neither
listens yet.
"""


def free_port() -> int:
    """
    Return a TCP port of 127.0.0.1 on which nothing listens and which no other call got lately.

    Raises:
        OSError: No port is free.
    """
    count = LAST - FIRST + 1
    with _LATEST.open("a+") as latest:
        fcntl.flock(latest, fcntl.LOCK_EX)
        latest.seek(0)
        start = _start(latest.read())
        for step in range(1, count + 1):
            port = FIRST + (start - FIRST + step) % count
            if _is_free(port):
                latest.truncate(0)
                latest.write(str(port))
                return port
    raise OSError(f"no free port from {FIRST} to {LAST}")


def _start(latest: str) -> int:
    """The port that was returned last; any if none was."""
    try:
        return int(latest)
    except ValueError:
        return random.SystemRandom().randint(FIRST, LAST)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> tuple[int, ...]:
    """
    Return different TCP ports of 127.0.0.1 on which nothing listens.

    Raises:
        OSError: Not enough ports are free.
    """
    return tuple(free_port() for _ in range(count))
