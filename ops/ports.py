"""Ports of this machine."""

import random
import socket

FIRST, LAST = 20_000, 32_000
"""
Below the ports that Linux gives to outgoing connections: such a connection could take a port before
the server that needs it has started.
"""
_TRIES = 100


def free_port() -> int:
    """
    Return a TCP port of 127.0.0.1 on which nothing listens.

    Raises:
        OSError: No tried port is free.
    """
    for _ in range(_TRIES):
        port = random.SystemRandom().randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {FIRST} to {LAST}")


def free_ports(count: int) -> tuple[int, ...]:
    """
    Return different TCP ports of 127.0.0.1 on which nothing listens.

    Raises:
        OSError: Not enough ports are free.
    """
    found: dict[int, None] = {}
    while len(found) < count:
        found[free_port()] = None
    return tuple(found)
