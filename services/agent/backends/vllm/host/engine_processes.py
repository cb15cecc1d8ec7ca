"""
Forks engine cores from a process that has imported vLLM and does nothing else.

The engine host cannot fork them itself: it has threads, and a lock held by one of them at
that moment, e.g. of the log, would stay locked in the engine core.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

ARCHITECTURES = "HEADWAY_ENGINE_ARCHITECTURES"
"""Environment variable of the fork server: model classes to import, separated by commas."""


def start_fork_server(architectures: str) -> None:
    """
    Start a process that imports what engine cores need.

    Args:
        architectures: Model classes that engines will have, separated by commas.
    """
    os.environ[ARCHITECTURES] = architectures
    multiprocessing.set_forkserver_preload(
        [
            "services.agent.backends.vllm.host.import_stubs",
            "services.agent.backends.vllm.host.fork_server",
        ]
    )
    forkserver.ensure_running()


class _ForkServerProcesses:
    """The part of a multiprocessing context that vLLM uses to start an engine core."""

    def Process(  # noqa: N802 - multiprocessing's name
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> BaseProcess:
        """A child of the fork server, with this process's environment."""
        return multiprocessing.get_context("forkserver").Process(
            target=_run, name=name, args=(dict(os.environ), target), kwargs=kwargs
        )


@contextlib.contextmanager
def forked_cleanly() -> Iterator[None]:
    """
    Context in which vLLM forks engine cores from the fork server. Not reentrant across threads.
    """
    from vllm.v1.engine import utils  # noqa: PLC0415 - the fork server is started before

    stock = utils.get_mp_context
    utils.get_mp_context = _ForkServerProcesses
    try:
        yield
    finally:
        utils.get_mp_context = stock


def _run(environment: Mapping[str, str], target: Callable[..., None], **kwargs: Any) -> None:
    for name, value in environment.items():
        # Do not write equal values again: the process title is located next to the environment's
        # memory.
        if os.environ.get(name) != value:
            os.environ[name] = value
    target(**kwargs)
