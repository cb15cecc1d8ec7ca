"""
Ask a service on this machine whether it is ready: `python -m shared.runtime.probe PORT`.

Container engines ask every few seconds. The verb `health` of each service gives the same answer,
but first reads the settings of the service, which takes several times as long.
"""

import sys
from http.client import HTTPConnection, HTTPException

TIMEOUT_S = 5.0
_OK = 200


def problem(port: int, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """
    Why the service is not ready; None if it is.

    Args:
        port: Port on which the service answers `/ready`.
        timeout_s: Time limit in seconds.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        return f"no answer from port {port}: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if response.status == _OK else f"status {response.status}: {text}"


def main(arguments: list[str]) -> int:
    """Return exit code 0 if the service is ready, 1 if not, and 2 without a port."""
    if len(arguments) != 1 or not arguments[0].isdecimal():
        sys.stderr.write("usage: python -m shared.runtime.probe PORT\n")
        return 2
    found = problem(int(arguments[0]))
    if found is not None:
        sys.stdout.write(f"{found}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
