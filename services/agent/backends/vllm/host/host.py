"""
The engine host: the process that imports vLLM and holds its engines.

The agent starts it as `python -m services.agent.backends.vllm.host.host --fd N`; it serves the
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

import services.agent.backends.vllm.host.processes.import_stubs  # noqa: F401 - before vLLM
from services.agent.backends.vllm.host.processes.engine_processes import start_fork_server
from services.agent.backends.vllm.host.processes.parent_death import die_with_parent, watch_parent

log = structlog.get_logger()


async def serve(connected: socket.socket, architectures: list[str]) -> None:
    """Import vLLM, report that, and serve until the agent ends or sends a stop."""
    # Import `describe` here, so that an import of this module for its name does not import vLLM.
    from services.agent.backends.vllm.host.engines import describe  # noqa: PLC0415
    from services.agent.backends.vllm.host.serving import EngineHost  # noqa: PLC0415
    from services.agent.backends.vllm.shared.wire import Connection, HostCommand  # noqa: PLC0415
    from services.engine_core.models import import_architectures  # noqa: PLC0415

    import_architectures(architectures)
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
    """Entry point of the engine host."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fd", type=int, required=True, help=("file descriptor of the host's end of a socket pair")
    )
    parser.add_argument(
        "--scratch", type=Path, required=True, help="directory that is removed at the end"
    )
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
        # The agent also removes this directory, unless the agent was killed.
        shutil.rmtree(options.scratch, ignore_errors=True)
        # Terminate engines that have not ended by themselves: this process leads their process
        # group, and ignores the signal itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGTERM)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Python would spend seconds on finalizing vLLM's modules.
    os._exit(status)
