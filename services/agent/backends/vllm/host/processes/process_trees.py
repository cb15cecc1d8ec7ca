"""All processes of an engine: its cores and their workers."""

import faulthandler
import threading
from pathlib import Path

import psutil
import structlog

from services.agent.backends.vllm.host.core_engine import CoreEngine

log = structlog.get_logger()
_END_TIMEOUT_S = 10.0
"""Time limit for killed processes to end, while the kernel frees their memory."""
_CLEANUP_TIMEOUT_S = 30.0
"""
Time limit of the whole end of an engine. A thread of vLLM cleans up a dead core at the same time,
and once in many deaths the two have waited without end.
"""


def engine_bytes(engine: CoreEngine) -> int:
    """
    Proportional set size of *engine*'s processes, including workers and other children.

    Returns:
        Bytes; 0 where the system does not report it.
    """
    pids = {process.pid or 0 for process in engine.processes}
    pids |= {worker.pid for worker in engine.workers}
    return sum(map(_proportional_bytes, pids))


def children_of(engine: CoreEngine) -> tuple[psutil.Process, ...]:
    """Children of *engine*'s cores. If a core has ended, its children cannot be found any more."""
    children: list[psutil.Process] = []
    for process in engine.processes:
        try:
            children += psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return tuple(children)


def end_engine(engine: CoreEngine) -> None:
    """
    Kill *engine*'s processes and wait until their memory is free.

    The processes need no cleanup, and a normal shutdown takes a second for each. If the end takes
    longer than `_CLEANUP_TIMEOUT_S`, the stacks of all threads are written to the log, and the
    engine is left to its thread.
    """
    ending = threading.Thread(target=_end, args=(engine,), name="end-engine", daemon=True)
    ending.start()
    ending.join(_CLEANUP_TIMEOUT_S)
    if ending.is_alive():
        log.error("engine.not_ended", timeout_s=_CLEANUP_TIMEOUT_S)
        faulthandler.dump_traceback(all_threads=True)


def _end(engine: CoreEngine) -> None:
    cores = engine.processes
    engine.shutdown()
    for process in cores:
        process.join(_END_TIMEOUT_S)
    # A worker that outlives its core ends by itself after seconds, and holds the device until then.
    for worker in engine.workers:
        try:
            worker.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(engine.workers, timeout=_END_TIMEOUT_S)


def _proportional_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in rollup.splitlines())
    return next((1024 * int(words[1]) for words in lines if words[0] == "Pss:"), 0)
