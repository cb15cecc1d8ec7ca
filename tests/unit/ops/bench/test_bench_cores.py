"""Pinning of measured instances to cores, and the load of other processes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from ops.bench.cores import OtherLoad, give_cores

_PARENT = (
    "import subprocess, sys, threading, time;"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start();"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print('ready', flush=True); time.sleep(60)"
)
_BUSY = "print('ready', flush=True)\nwhile True: pass"


@contextmanager
def process(code: str) -> Iterator[int]:
    """A process that runs *code* and has reported its readiness."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        try:
            yield running.pid
        finally:
            for each in psutil.Process(running.pid).children(recursive=True):
                each.kill()
            running.kill()


def cores_of(pid: int) -> set[frozenset[int]]:
    """Cores on which the threads of a process and of its children may run."""
    root = psutil.Process(pid)
    return {
        frozenset(os.sched_getaffinity(thread.id))
        for each in (root, *root.children())
        for thread in each.threads()
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_each_process_with_threads_and_children_has_its_own_core():
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with process(_PARENT) as one, process(_PARENT) as other:
        given = give_cores([one, other])

        assert given == 2
        assert cores_of(one) == {frozenset({first})}
        assert cores_of(other) == {frozenset({second})}


def test_with_fewer_cores_than_processes_no_process_is_pinned():
    everywhere = frozenset(os.sched_getaffinity(0))
    with process(_PARENT) as pid:
        given = give_cores([pid] * (len(everywhere) + 1))

        assert given == 0
        assert cores_of(pid) == {everywhere}


def test_an_ended_process_is_skipped():
    with process(_BUSY) as pid:
        pass

    assert give_cores([pid]) == 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A machine whose busy seconds and time a test sets."""
    said = [0.0, 1000.0]
    idle = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))
    monkeypatch.setattr(psutil, "cpu_times", lambda: idle._replace(user=said[0]))
    monkeypatch.setattr("ops.bench.cores.time.time", lambda: said[1])
    monkeypatch.setattr("ops.bench.cores.os.cpu_count", lambda: 2)
    return said


def test_load_of_child_processes_is_not_other_load(machine: list[float]):
    """A child uses at least 0.3 of ten busy seconds, this process its sampling time."""
    with process(_BUSY) as pid:
        others = OtherLoad()
        until_s = sum(psutil.Process(pid).cpu_times()[:2]) + 0.3
        while sum(psutil.Process(pid).cpu_times()[:2]) < until_s:
            pass
        machine[:] = 10.0, 1010.0
        others.sample()

    assert 0 < others.share(1000.0, 1010.0) < 9.7 / 20


def test_load_share_covers_only_the_requested_interval(machine: list[float]):
    """Other processes first use one of two cores, later no core."""
    others = OtherLoad()
    for busy_s, now in ((10.0, 1010.0), (10.5, 1020.0)):
        machine[:] = busy_s, now
        others.sample()

    assert others.share(1000.0, 1010.0) == pytest.approx(0.5, abs=0.01)
    assert others.share(1010.0, 1020.0) == pytest.approx(0.025, abs=0.01)
    assert others.share(1005.0, 1015.0) == pytest.approx(0.2625, abs=0.01)
    assert others.share(1004.9, 1005.1) == pytest.approx(0.5, abs=0.01)


async def test_load_of_other_processes_is_sampled_periodically(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ops.bench.cores.SAMPLE_S", 0.01)
    others = OtherLoad()
    looks: list[OtherLoad] = []

    def look(self: OtherLoad) -> None:
        looks.append(self)

    monkeypatch.setattr(OtherLoad, "sample", look)
    following = asyncio.create_task(others.follow())
    while len(looks) < 3:
        await asyncio.sleep(0.01)
    following.cancel()

    assert set(looks) == {others}
