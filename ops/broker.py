"""Private RabbitMQ node, for machines where rabbitmq-server is installed but not running."""

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from shared.contracts.errors import BrokerUnavailableError, SettingsError

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
MAX_FILES = 65536
"""
Limit of open files of the node, as in RabbitMQ's packages; Erlang reserves memory for each file.
"""
_DEBIAN_BIN = Path("/usr/lib/rabbitmq/bin")
"""
RabbitMQ's programs; Debian's wrappers in /usr/sbin change the user and drop the environment.
"""


def rabbitmq_binary(name: str) -> str | None:
    """Return the path of a RabbitMQ program; None when it is not installed."""
    candidate = _DEBIAN_BIN / name
    return str(candidate) if candidate.exists() else shutil.which(name)


class PrivateNode:
    """
    One RabbitMQ node with its own name, ports, cookie, port mapper and data.

    Args:
        directory: Folder for all of the node's files; an existing node of this folder is reused.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._state_file = self._directory / "node.json"
        if self._state_file.exists():
            state = json.loads(self._state_file.read_text())
        else:
            port, dist_port, epmd_port = _free_ports(3)
            state = {"port": port, "dist_port": dist_port, "epmd_port": epmd_port, "pids": {}}
        self._state = state
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._name = f"headway-{state['port']}@localhost"

    @property
    def port(self) -> int:
        return int(self._state["port"])

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def running(self) -> bool:
        """Return whether the RabbitMQ node answers as an AMQP server."""
        return answers("127.0.0.1", self.port)

    def start(self) -> None:
        """
        Start the node and wait until it answers; data of an earlier run is kept.

        Raises:
            SettingsError: rabbitmq-server is not installed.
            BrokerUnavailableError: The node does not start; the message names the log.
        """
        if self.running:
            return
        server = rabbitmq_binary("rabbitmq-server")
        if server is None:
            raise SettingsError("rabbitmq-server is not installed")
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "enabled_plugins").write_text("[].\n")
        (self._directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\n"
            "consumer_timeout = 21600000\n"
            "disk_free_limit.absolute = 50MB\n"
        )
        self._start_port_mapper()
        log = self._directory / "startup.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["sh", "-c", f'ulimit -S -n {_file_limit()} && exec "$0"', server],
                env=self._env(),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._remember("server", process)
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self.running:
            if process.poll() is not None or time.monotonic() > give_up_at:
                self.kill()
                raise BrokerUnavailableError(f"RabbitMQ did not start; see {log}")
            time.sleep(0.1)

    def stop(self) -> None:
        """
        Shut the RabbitMQ node down cleanly, as in a broker restart; clients see their connections
        close.
        """
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the RabbitMQ node with SIGKILL."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stop the RabbitMQ node and its port mapper."""
        self.stop()
        self._end_process(self._state["pids"].get("epmd"), signal.SIGTERM)
        self._forget("epmd")

    def ctl(self, *arguments: str) -> str:
        """
        Return the standard output of `rabbitmqctl` on this node.

        Raises:
            BrokerUnavailableError: The command failed.
        """
        program = rabbitmq_binary("rabbitmqctl")
        if program is None:
            raise SettingsError("rabbitmqctl is not installed")
        return run_ctl([program, "-q", "-n", self._name, *arguments], env=self._env())

    def _env(self) -> dict[str, str]:
        inherited = {key: os.environ[key] for key in ("PATH", "LANG", "TZ") if key in os.environ}
        directory = self._directory
        return {
            **inherited,
            "HOME": str(directory),
            "RABBITMQ_NODENAME": self._name,
            "RABBITMQ_DIST_PORT": str(self._state["dist_port"]),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "rabbitmq.pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "no-rabbitmq-env.conf"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self._state["epmd_port"]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _start_port_mapper(self) -> None:
        # Start the port mapper as a child process: Erlang would start it as a daemon.
        pid = self._state["pids"].get("epmd")
        epmd = shutil.which("epmd")
        if epmd is not None and not self._is_running(pid):
            process = subprocess.Popen(
                [epmd, "-port", str(self._state["epmd_port"]), "-address", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._remember("epmd", process)

    def _end(self, how: signal.Signals) -> None:
        # Kill Erlang's virtual machine first: the launcher is a shell that waits for it.
        pid_file = self._directory / "rabbitmq.pid"
        beam = int(pid_file.read_text()) if pid_file.exists() else None
        launcher = self._state["pids"].get("server")
        if launcher is None:
            return
        self._end_process(beam, how)
        self._end_process(launcher, signal.SIGTERM)
        pid_file.unlink(missing_ok=True)
        self._forget("server")

    def _end_process(self, pid: int | None, how: signal.Signals) -> None:
        if pid is None or not self._is_running(pid):
            return
        os.kill(pid, how)
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        while self._is_running(pid):
            if time.monotonic() > give_up_at:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _is_running(self, pid: int | None) -> bool:
        if pid is None:
            return False
        if (child := self._children.get(pid)) is not None:
            return child.poll() is None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _remember(self, what: str, process: subprocess.Popen[bytes]) -> None:
        self._children[process.pid] = process
        self._state["pids"][what] = process.pid
        self._state_file.write_text(json.dumps(self._state))

    def _forget(self, what: str) -> None:
        self._state["pids"].pop(what, None)
        if self._state_file.exists():
            self._state_file.write_text(json.dumps(self._state))


def _file_limit() -> int:
    """Number of files that the node may open; RabbitMQ 3 reserves three per quorum queue."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)


def run_ctl(command: list[str], *, env: dict[str, str] | None = None) -> str:
    """
    Return the standard output of a rabbitmqctl command.

    Raises:
        BrokerUnavailableError: The command failed or took over a minute.
    """
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokerUnavailableError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BrokerUnavailableError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout


def answers(host: str, port: int, *, timeout_s: float = 2.0) -> bool:
    """Return whether an AMQP 0-9-1 server listens at *host* and *port*."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def main(argv: list[str] | None = None) -> int:
    """
    Run `python -m ops.broker start|stop|status --dir DIR`; prints the URL while the node runs.
    """
    parser = argparse.ArgumentParser(prog="python -m ops.broker", description=__doc__)
    parser.add_argument("verb", choices=("start", "stop", "status"))
    parser.add_argument("--dir", type=Path, required=True, help="directory of the node")
    arguments = parser.parse_args(argv)
    node = PrivateNode(arguments.dir)
    try:
        if arguments.verb == "start":
            node.start()
        elif arguments.verb == "stop":
            node.close()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokerUnavailableError as error:
        print(error, file=sys.stderr)
        return 3
    running = node.running
    if running:
        print(node.url)
    return 0 if running == (arguments.verb != "stop") else 1


if __name__ == "__main__":
    sys.exit(main())
