"""Ids and times in the response to a call that are equal in each of its runs."""

import sys
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from shared.contracts.base import UnixTime

_NAMESPACE = uuid.UUID(int=0x68656164776179)
_random_uuid = uuid.uuid4


@dataclass(slots=True)
class Identity:
    """What the ids and times of a call are made of."""

    name: str
    """Id of the request."""
    arrived_at: UnixTime
    num_ids: int = 0

    def next_uuid(self) -> uuid.UUID:
        """The next id; those of two runs are equal, in order."""
        self.num_ids += 1
        return uuid.uuid5(_NAMESPACE, f"{self.name}/{self.num_ids}")


identity_of_call: ContextVar[Identity | None] = ContextVar("identity of the call", default=None)
"""Identity of the call in whose context the application runs."""


class _Time:
    """The module `time`, whose `time()` is the call's arrival."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def time() -> UnixTime:
        identity = identity_of_call.get()
        return time.time() if identity is None else identity.arrived_at


def _uuid4() -> uuid.UUID:
    identity = identity_of_call.get()
    return _random_uuid() if identity is None else identity.next_uuid()


def repeat_ids_and_times() -> None:
    """
    Let the modules of vLLM's application take ids and times from the call; call it when they have
    been imported.
    """
    uuid.uuid4 = _uuid4
    own = _Time()
    for name, module in tuple(sys.modules.items()):
        if name.startswith("vllm.entrypoints.") and getattr(module, "time", None) is time:
            module.time = own  # type: ignore[attr-defined]
