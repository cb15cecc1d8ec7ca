"""
The engine host: the process that imports vLLM and holds its engines.

Started by the agent as `python -m services.agent.backends.vllm.host --fd N`; serves the
commands of `wire` until the socket closes.
"""

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import structlog

import services.agent.backends.vllm.unneeded  # noqa: F401 - before vLLM
from services.agent.backends.vllm.engine_processes import start_fork_server
from services.agent.backends.vllm.orphans import die_with_parent, watch_parent

log = structlog.get_logger()


async def serve(connected: socket.socket, architectures: list[str]) -> None:
    """Import vLLM, say so, and serve until the agent is gone or says stop."""
    # Here, not above: whoever imports this module to name it must not import vLLM.
    from services.agent.backends.vllm.engines import describe, register_early  # noqa: PLC0415
    from services.agent.backends.vllm.serving import EngineHost  # noqa: PLC0415
    from services.agent.backends.vllm.wire import Connection, HostCommand  # noqa: PLC0415

    register_early(architectures)
    reader, writer = await asyncio.open_unix_connection(sock=connected)
    connection: Connection[HostCommand] = Connection(reader, writer, HostCommand)
    connection.send(describe())
    host = EngineHost(connection)
    try:
        await host.run()
    finally:
        connection.close()
        host.close()


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="our end of a socket pair")
    parser.add_argument("--scratch", type=Path, required=True, help="removed at the end")
    parser.add_argument("--architectures", default="", help="model classes to import early")
    options = parser.parse_args(arguments)
    start_fork_server(options.architectures)
    watch_parent()
    die_with_parent()
    connected = socket.socket(fileno=options.fd)
    architectures = [name for name in options.architectures.split(",") if name]
    try:
        asyncio.run(serve(connected, architectures))
    except ImportError as error:
        log.error("host.failed", reason=f"cannot import vLLM: {error}")
        return 1
    finally:
        # The agent does this too, unless it was killed.
        shutil.rmtree(options.scratch, ignore_errors=True)
        # Engines that did not go by themselves; this process is the group's leader.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGTERM)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Python would spend seconds on taking all of vLLM's modules apart.
    os._exit(status)
