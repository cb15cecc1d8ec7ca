"""Cores for instances under measurement, and what others take meanwhile."""

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
    """A process that runs *code* and has said that it is ready."""
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
    """Where the threads of a process and of its children may run."""
    root = psutil.Process(pid)
    return {
        frozenset(os.sched_getaffinity(thread.id))
        for each in (root, *root.children())
        for thread in each.threads()
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_each_process_has_a_core_of_its_own_with_all_its_threads_and_children():
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with process(_PARENT) as one, process(_PARENT) as other:
        given = give_cores([one, other])

        assert given == 2
        assert cores_of(one) == {frozenset({first})}
        assert cores_of(other) == {frozenset({second})}


def test_with_fewer_cores_than_processes_nothing_changes():
    everywhere = frozenset(os.sched_getaffinity(0))
    with process(_PARENT) as pid:
        given = give_cores([pid] * (len(everywhere) + 1))

        assert given == 0
        assert cores_of(pid) == {everywhere}


def test_a_process_that_has_ended_is_passed_over():
    with process(_BUSY) as pid:
        pass

    assert give_cores([pid]) == 1


def test_what_our_children_compute_is_not_taken_by_others(monkeypatch: pytest.MonkeyPatch):
    """Of ten busy seconds of the machine a child takes at least 0.3."""
    machine = psutil.cpu_times()._replace(user=0.0)
    now_s = 0.0
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine)
    monkeypatch.setattr("ops.bench.cores.time.monotonic", lambda: now_s)
    others = OtherLoad()
    with process(_BUSY) as pid:
        while sum(psutil.Process(pid).cpu_times()[:2]) < 0.3:
            pass
        machine, now_s = machine._replace(user=10.0), 10.0
        others_s = others.share() * now_s * (os.cpu_count() or 1)

    assert 0 < others_s < 9.7


def test_all_that_is_busy_is_of_others_while_we_do_nothing(monkeypatch: pytest.MonkeyPatch):
    machine = psutil.cpu_times()
    now_s = 0.0
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine)
    monkeypatch.setattr("ops.bench.cores.time.monotonic", lambda: now_s)
    others = OtherLoad()
    machine, now_s = machine._replace(user=machine.user + 10.0, idle=machine.idle + 5.0), 10.0

    assert others.share() == pytest.approx(1.0 / (os.cpu_count() or 1), abs=0.02)
