"""
Engine cores are forked from a process that has imported vLLM and does nothing else.

Not from the engine host: it has threads, and a lock that one of them holds at that moment, of
the log for instance, would be held in the engine core for ever.
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
    Begin to import what engine cores need, in a process beside this one.

    Args:
        architectures: Model classes that engines will have, separated by commas.
    """
    os.environ[ARCHITECTURES] = architectures
    package = __name__.rpartition(".")[0]
    multiprocessing.set_forkserver_preload([f"{package}.unneeded", f"{package}.fork_server"])
    forkserver.ensure_running()


class _ForkServerProcesses:
    """As much of a multiprocessing context as vLLM uses to start an engine core."""

    def Process(  # noqa: N802 - multiprocessing's name
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> BaseProcess:
        """A child of the fork server, with this process's environment."""
        return multiprocessing.get_context("forkserver").Process(
            target=_run, name=name, args=(dict(os.environ), target), kwargs=kwargs
        )


@contextlib.contextmanager
def forked_cleanly() -> Iterator[None]:
    """Within, vLLM's engine cores are forked from the fork server. Not for two threads at once."""
    from vllm.v1.engine import utils  # noqa: PLC0415 - the fork server is started before

    stock = utils.get_mp_context
    utils.get_mp_context = _ForkServerProcesses
    try:
        yield
    finally:
        utils.get_mp_context = stock


def _run(environment: Mapping[str, str], target: Callable[..., None], **kwargs: Any) -> None:
    for name, value in environment.items():
        # What is equal stays where it is: the process title is found beside it.
        if os.environ.get(name) != value:
            os.environ[name] = value
    target(**kwargs)
