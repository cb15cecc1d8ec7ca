"""Ensures that no process of the engine host outlives the agent."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_GRACE_S = 10.0


def die_with_parent() -> None:
    """
    Make forked children die when the process that forks them dies, from this call on. Linux only.

    The rule applies to children of children also: workers die with their engine core.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    parent = 0

    def remember() -> None:
        nonlocal parent
        parent = os.getpid()

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=bind)


def watch_parent() -> None:
    """
    End the whole process group soon after the parent has died.

    A thread detects the parent's death, since the event loop is blocked while an engine starts. The
    normal shutdown, which begins when the socket closes, gets some seconds first.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        time.sleep(_GRACE_S)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
