"""Private RabbitMQ node, for machines where rabbitmq-server is installed but not running."""

import argparse
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from ops.ports import free_ports
from ops.releases import SYSTEM, Release, four, install_four
from shared.contracts.errors import BrokerUnavailableError, SettingsError

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
JOIN_TIMEOUT_S = 50
"""Time for a node to join the others, below the time limit of `run_ctl`."""
_KNOWS_QUEUES = "[rabbit_feature_flags:is_enabled(F) || F <- [quorum_queue, stream_queue]]."
_TIMED_OUT = "precondition_failed: delivery acknowledgement on channel"
FAST_TICKS = "[{rabbit, [{channel_tick_interval, 500}]}]."
"""`advanced.config` with which a node looks for late acknowledgements every 0.5 s, not 60 s."""
_NO_SETTINGS: Mapping[str, object] = MappingProxyType({})
MAX_FILES = 65536
"""
Limit of open files of the node, as in RabbitMQ's packages; Erlang reserves memory for each file.
"""


def rabbitmq_binary(name: str) -> str | None:
    """Return the path of a program of the system's RabbitMQ; None when it is not installed."""
    return SYSTEM.program(name)


class PrivateNode:
    """
    One RabbitMQ node with its own name, ports, cookie, port mapper and data.

    Args:
        directory: Folder for all of the node's files; an existing node of this folder is reused.
        release: RabbitMQ that the node runs.
        settings: Settings of `rabbitmq.conf` beyond the ports; the others have RabbitMQ's defaults.
        advanced: Contents of `advanced.config`: an Erlang term with settings that `rabbitmq.conf`
            does not have.
        plugins: Names of enabled plugins, of those that the release has.
        port_mapper: Port of the port mapper that the nodes of a cluster share; by default the node
            has its own.
    """

    def __init__(
        self,
        directory: Path,
        *,
        release: Release = SYSTEM,
        settings: Mapping[str, object] = _NO_SETTINGS,
        advanced: str = "[].",
        plugins: tuple[str, ...] = (),
        port_mapper: int | None = None,
    ) -> None:
        self._directory = directory.resolve()
        self._release = release
        self._settings = {"disk_free_limit.absolute": "50MB", **settings}
        self._advanced = advanced
        self._plugins = plugins
        self._state_file = self._directory / "node.json"
        if self._state_file.exists():
            state = json.loads(self._state_file.read_text())
        else:
            port, dist_port, epmd_port = free_ports(3)
            state = {"port": port, "dist_port": dist_port, "epmd_port": port_mapper or epmd_port}
        if state.get("boot") != _boot():
            state |= {"boot": _boot(), "pids": {}}  # the ids may now be those of other processes
        self._state = state
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._has_port_mapper = port_mapper is None
        self.name = f"headway-{state['port']}@localhost"

    @property
    def port(self) -> int:
        return int(self._state["port"])

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def num_timeouts(self) -> int:
        """Number of channels that the node has closed because of its `consumer_timeout`."""
        files = (self._directory / "log").glob("*.log")
        texts = (file.read_text(errors="replace") for file in files)
        return sum(text.count(_TIMED_OUT) for text in texts)

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
        server = self._release.program("rabbitmq-server")
        if server is None:
            raise SettingsError("rabbitmq-server is not installed")
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].\n")
        (self._directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\n"
            + "".join(f"{name} = {value}\n" for name, value in self._settings.items())
        )
        (self._directory / "advanced.config").write_text(f"{self._advanced}\n")
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
                self._end_port_mapper()
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
        self._end_port_mapper()

    def ctl(self, *arguments: str) -> str:
        """
        Return the standard output of `rabbitmqctl` on this node.

        Raises:
            BrokerUnavailableError: The command failed.
        """
        program = self._release.program("rabbitmqctl")
        if program is None:
            raise SettingsError("rabbitmqctl is not installed")
        return run_ctl([program, "-q", "-n", self.name, *arguments], env=self._env())

    def _env(self) -> dict[str, str]:
        inherited = {key: os.environ[key] for key in ("PATH", "LANG", "TZ") if key in os.environ}
        directory = self._directory
        inherited["PATH"] = os.pathsep.join((*self._release.path, inherited.get("PATH", "")))
        return {
            **inherited,
            "HOME": str(directory),
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_DIST_PORT": str(self._state["dist_port"]),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "rabbitmq.pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "no-rabbitmq-env.conf"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self._state["epmd_port"]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _start_port_mapper(self) -> None:
        # Start the port mapper as a child process: Erlang would start it as a daemon.
        if not self._has_port_mapper:
            return
        pid = self._state["pids"].get("epmd")
        epmd = self._release.program("epmd")
        if epmd is not None and not self._is_running(pid):
            process = subprocess.Popen(
                [epmd, "-port", str(self._state["epmd_port"]), "-address", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._remember("epmd", process)

    def _end_port_mapper(self) -> None:
        self._end_process(self._state["pids"].get("epmd"), signal.SIGTERM)
        self._forget("epmd")

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


class PrivateCluster:
    """
    A cluster of RabbitMQ nodes on this machine, with private names, ports, cookie and data.

    Args:
        directory: Folder for the files of all nodes; it must not have a cluster yet.
        num_nodes: Number of nodes.
        release: RabbitMQ that the nodes run.
        settings: Further settings of `rabbitmq.conf` of each node.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_nodes: int = 3,
        release: Release = SYSTEM,
        settings: Mapping[str, object] = _NO_SETTINGS,
    ) -> None:
        self._directory = directory.resolve()
        self._release = release
        (self._epmd_port,) = free_ports(1)
        self._epmd: subprocess.Popen[bytes] | None = None
        self.nodes: list[PrivateNode] = []
        for number in range(num_nodes):
            joined = dict(settings) | {"cluster_partition_handling": "pause_minority"}
            if self.nodes:
                # The first node begins alone: with a list of others it would wait for them.
                joined |= {
                    "cluster_formation.peer_discovery_backend": "classic_config",
                    "cluster_formation.classic_config.nodes.1": self.nodes[0].name,
                    "cluster_formation.discovery_retry_limit": 120,
                }
            node = PrivateNode(
                self._directory / f"node-{number}",
                release=release,
                settings=joined,
                port_mapper=self._epmd_port,
            )
            self.nodes.append(node)

    @property
    def url(self) -> str:
        """URLs of all nodes, as `amqp_url` takes them."""
        return ",".join(node.url for node in self.nodes)

    def start(self) -> None:
        """
        Start all nodes, and wait until they are one cluster.

        Raises:
            SettingsError: RabbitMQ is not installed.
            BrokerUnavailableError: A node does not start, or does not join in time.
        """
        epmd = self._release.program("epmd")
        if epmd is None:
            raise SettingsError("rabbitmq-server is not installed")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._epmd = subprocess.Popen(
            [epmd, "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        cookie = secrets.token_hex(16).upper()
        for number in range(len(self.nodes)):
            file = self._directory / f"node-{number}" / ".erlang.cookie"
            file.parent.mkdir(exist_ok=True)
            file.write_text(cookie)
            file.chmod(0o400)
        try:
            first, *others = self.nodes
            first.start()  # the others join it
            with ThreadPoolExecutor(len(self.nodes)) as threads:
                list(threads.map(PrivateNode.start, others))
            for node in self.nodes:
                self.await_joined(node)
        except BaseException:  # also when interrupted: no node may stay
            self.close()
            raise

    def await_joined(self, node: PrivateNode) -> None:
        """
        Wait until *node* sees all nodes and can declare every kind of queue: a node answers before.

        Raises:
            BrokerUnavailableError: It does not in time.
        """
        node.ctl("await_online_nodes", str(len(self.nodes)), "--timeout", str(JOIN_TIMEOUT_S))
        give_up_at = time.monotonic() + JOIN_TIMEOUT_S
        while node.ctl("eval", _KNOWS_QUEUES).strip() != "[true,true]":
            if time.monotonic() > give_up_at:
                raise BrokerUnavailableError(
                    f"{node.name} has not enabled its queue types within {JOIN_TIMEOUT_S} s"
                )
            time.sleep(0.2)

    def close(self) -> None:
        """Kill all nodes and their port mapper; the data is of no use afterwards."""
        for node in self.nodes:
            node.kill()
        if self._epmd is not None:
            self._epmd.terminate()
            self._epmd.wait(STOP_TIMEOUT_S)


def _boot() -> str:
    """Id of the machine's present run, on Linux."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""


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


def main(argv: list[str] | None = None) -> int:
    """
    Run `python -m ops.broker VERB`.

    `start`, `stop` and `status` of the node in `--dir` print its URL while the node runs.
    `install-4` unpacks RabbitMQ 4 into .headway, and changes nothing of the system.
    """
    parser = argparse.ArgumentParser(prog="python -m ops.broker", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install-4", help="unpack RabbitMQ 4 into .headway, for tests")
    for verb in ("start", "stop", "status"):
        command = verbs.add_parser(verb)
        command.add_argument("--dir", type=Path, required=True, help="directory of the node")
        command.add_argument("--four", action="store_true", help="run RabbitMQ 4 of install-4")
    arguments = parser.parse_args(argv)
    try:
        if arguments.verb == "install-4":
            print(install_four().programs)
            return 0
        return _control(arguments)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokerUnavailableError as error:
        print(error, file=sys.stderr)
        return 3


def _control(arguments: argparse.Namespace) -> int:
    """
    Start, stop or look at a node; return the exit code.

    Raises:
        SettingsError: The release is not installed.
        BrokerUnavailableError: The node does not start.
    """
    release = four() if arguments.four else SYSTEM
    if release is None:
        raise SettingsError("RabbitMQ 4 is not installed: run `python -m ops.broker install-4`")
    node = PrivateNode(arguments.dir, release=release)
    if arguments.verb == "start":
        node.start()
    elif arguments.verb == "stop":
        node.close()
    running = node.running
    if running:
        print(node.url)
    return 0 if running == (arguments.verb != "stop") else 1


if __name__ == "__main__":
    sys.exit(main())
