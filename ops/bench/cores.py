"""
Pins a measured mesh to cores, and measures the load of other processes.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from services.mesh.processes import ProcessMesh
from shared.contracts.base import Seconds, UnixTime

SAMPLE_S = 2.0
"""Interval between two samples of the CPU load of other processes."""


def agent_pids(mesh: ProcessMesh) -> tuple[int, ...]:
    """Process ids of the mesh's agents; engine processes are children of the agents."""
    return tuple(each.pid for name, each in mesh.processes.items() if name.startswith("agent-"))


def give_cores(pids: Sequence[int]) -> int:
    """
    Pin each process of *pids*, with all its descendants, to a separate core.

    In production, each instance has its own device. Here engines share cores, and the kernel's
    scheduler determines their speed: without pinning, one of two engines on two cores is often
    twice as fast as the other for some seconds. Other processes are not pinned.

    Returns:
        Number of pinned processes; 0 if there are fewer cores than processes.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(pids):
        return 0
    for pid, core in zip(pids, cores, strict=False):
        _pin((pid,), {core})
    return len(pids)


@dataclass(frozen=True, slots=True)
class EngineCores:
    """Cores for engines alone."""

    cores: Sequence[int]

    def give_to_children(self, pid: int) -> None:
        """Move the descendants of a process, which are its engines, to these cores."""
        _pin([child.pid for child in psutil.Process(pid).children()], self.cores)


@contextlib.contextmanager
def apart_from_engines() -> Iterator[EngineCores]:
    """
    Context in which this process, and what it starts, uses the second half of the cores, and the
    engines that are moved the first half.

    In production, engines compute on devices of their own. Here they share cores with what serves
    requests around them, which would slow them down the more it does.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    os.sched_setaffinity(0, cores[half:])
    try:
        yield EngineCores(cores[:half] or cores)
    finally:
        os.sched_setaffinity(0, cores)


def _pin(pids: Iterable[int], cores: Iterable[int]) -> None:
    """Let processes, with all their descendants, run on *cores* only."""
    for process in _with_children(pids):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


def computed_s(pid: int) -> Seconds:
    """User and system time of a process and of all its descendants, including ended ones."""
    used_s = 0.0
    for process in _with_children((pid,)):
        with contextlib.suppress(psutil.NoSuchProcess):
            # User and system time of the process and of its ended children.
            used_s += sum(process.cpu_times()[:4])
    return used_s


class OtherLoad:
    """
    CPU time of all processes except this one and its children, over time.

    Includes a broker that was already running, and the kernel's work for all processes.
    """

    def __init__(self) -> None:
        self._ours = _with_children((os.getpid(),))
        self._at: list[UnixTime] = []
        self._others_s: list[Seconds] = []
        self.sample()

    def sample(self) -> None:
        """Take a sample of the CPU time that other processes have used so far."""
        self._at.append(time.time())
        self._others_s.append(_busy_s() - _computed_s(self._ours))

    async def follow(self) -> None:
        """Take samples of the CPU time of other processes until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def share(self, since: UnixTime, until: UnixTime) -> float:
        """
        Share of all cores that other processes used from *since* to *until*, 0..1, averaged over at
        least 1 s.
        """
        if until - since < SAMPLE_S:
            since, until = (since + until - SAMPLE_S) / 2, (since + until + SAMPLE_S) / 2
        first_s, last_s = np.interp((since, until), self._at, self._others_s)
        return max(0.0, float(last_s - first_s)) / ((until - since) * (os.cpu_count() or 1))


def _busy_s() -> Seconds:
    """
    CPU seconds of all processes since boot; seconds of virtual guests count once.
    """
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
