"""
Forks engine cores from a fork server: a process that only imports vLLM.

The engine host cannot fork engine cores itself, because it has threads. A lock that a thread holds
during the fork, such as the lock of the log, would stay locked in the engine core.
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
    Start the fork server, which imports the modules that engine cores need.

    Args:
        architectures: Model classes that engines will have, separated by commas.
    """
    os.environ[ARCHITECTURES] = architectures
    multiprocessing.set_forkserver_preload(
        [
            "services.agent.backends.vllm.host.processes.import_stubs",
            "services.agent.backends.vllm.host.processes.fork_server",
        ]
    )
    forkserver.ensure_running()


class _ForkServerProcesses:
    """Part of a multiprocessing context that vLLM uses to start an engine core."""

    def Process(  # noqa: N802 - multiprocessing's name
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> BaseProcess:
        """
        A child process of the fork server, with the environment of this process.

        The child forks its workers, so that they need no imports. It has no threads then.
        """
        environment = dict(os.environ) | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        return multiprocessing.get_context("forkserver").Process(
            target=_run, name=name, args=(environment, target), kwargs=kwargs
        )


@contextlib.contextmanager
def forked_cleanly() -> Iterator[None]:
    """Context in which vLLM forks engine cores from the fork server; for one thread at a time."""
    from vllm.v1.engine import utils  # noqa: PLC0415 - the fork server is started before

    stock = utils.get_mp_context
    utils.get_mp_context = _ForkServerProcesses
    try:
        yield
    finally:
        utils.get_mp_context = stock


def _run(environment: Mapping[str, str], target: Callable[..., None], **kwargs: Any) -> None:
    for name, value in environment.items():
        # Do not write equal values again: the write could overwrite the process title, which is
        # located next to the environment's memory.
        if os.environ.get(name) != value:
            os.environ[name] = value
    target(**kwargs)
