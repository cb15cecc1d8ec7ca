"""Cores of this machine: which a mesh under measurement computes on, and what others take."""

import contextlib
import os
import time
from collections.abc import Iterable, Sequence

import psutil

from services.mesh.processes import ProcessMesh
from shared.contracts.base import Seconds


def agent_pids(mesh: ProcessMesh) -> tuple[int, ...]:
    """Of the mesh's agents; engines are their children."""
    return tuple(each.pid for name, each in mesh.processes.items() if name.startswith("agent-"))


def give_cores(pids: Sequence[int]) -> int:
    """
    Each of these processes, with all that it has started, gets a core of its own.

    Instances have a device each. Engines that share this machine's cores instead serve as fast
    as the system lets them, and of two on two cores one is often twice as fast as the other for
    some seconds, and then the other. Processes that are not given any go wherever there is time.

    Returns:
        Processes that got one: none where there are fewer cores than processes.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(pids):
        return 0
    for pid, core in zip(pids, cores, strict=False):
        for process in _with_children((pid,)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {core})
    return len(pids)


class OtherLoad:
    """
    CPU time that went neither to this process nor to its children, since this was made.

    A broker that ran before is among the others, and what the kernel does for everybody.
    """

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._others_s = _others_s()

    def share(self) -> float:
        """Of all cores' time, 0..1."""
        cores_s = (time.monotonic() - self._began_at) * (os.cpu_count() or 1)
        return max(0.0, _others_s() - self._others_s) / max(1e-9, cores_s)


def _others_s() -> Seconds:
    """CPU seconds of all but ours, since the machine was started."""
    spent = psutil.cpu_times()
    busy_s: Seconds = sum(spent) - spent.idle - spent.iowait - spent.guest - spent.guest_nice
    for process in _with_children((os.getpid(),)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            busy_s -= times.user + times.system
    return busy_s


def _with_children(pids: Iterable[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
    return found
