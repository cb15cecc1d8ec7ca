"""Cores of this machine: which a mesh under measurement computes on, and what others take."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Sequence

import numpy as np
import psutil

from services.mesh.processes import ProcessMesh
from shared.contracts.base import Seconds, UnixTime

SAMPLE_S = 2.0
"""Between two looks at what others compute."""


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
    CPU time that went neither to this process nor to its children, over time.

    A broker that ran before is among the others, and what the kernel does for everybody.
    """

    def __init__(self) -> None:
        self._ours = _with_children((os.getpid(),))
        self._at: list[UnixTime] = []
        self._others_s: list[Seconds] = []
        self.sample()

    def sample(self) -> None:
        """Look at what has been computed so far."""
        self._at.append(time.time())
        self._others_s.append(_busy_s() - _computed_s(self._ours))

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def share(self, since: UnixTime, until: UnixTime) -> float:
        """Of all cores' time between two times, 0..1; as little as a second says nothing."""
        if until - since < SAMPLE_S:
            since, until = (since + until - SAMPLE_S) / 2, (since + until + SAMPLE_S) / 2
        first_s, last_s = np.interp((since, until), self._at, self._others_s)
        return max(0.0, float(last_s - first_s)) / ((until - since) * (os.cpu_count() or 1))


def _busy_s() -> Seconds:
    """CPU seconds of everybody since the machine was started; a guest's are its host's, too."""
    spent = psutil.cpu_times()
    return float(sum(spent) - spent.idle - spent.iowait - spent.guest - spent.guest_nice)


def _computed_s(processes: Iterable[psutil.Process]) -> Seconds:
    computed_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            computed_s += times.user + times.system
    return computed_s


def _with_children(pids: Iterable[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
    return found
