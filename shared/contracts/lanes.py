"""Lanes: what a request's queue name says about it. The layout is versioned data."""

from enum import Enum
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from shared.contracts.base import Message, ModelName, Seconds, Value
from shared.contracts.errors import ContractError
from shared.contracts.qos import Importance

_INBOX = "inbox."


class WorkClass(Enum):
    """Predicted prefill plus decode work, below or above the layout's edge."""

    SHORT = "short"
    LONG = "long"


class LaneLayout(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lane.layout.v1"):
    """
    How requests are divided into lanes. Old versions drain while the new one fills.

    Deadline band b covers time left at ingest in
    [first_band_s·ratio^(b-1), first_band_s·ratio^b); band 0 is anything sooner,
    band `num_bands` is best effort.
    """

    version: Annotated[int, Meta(ge=1)] = 1
    first_band_s: Seconds = 0.5
    band_ratio: Annotated[float, Meta(gt=1)] = 2.5
    num_bands: Annotated[int, Meta(ge=1, le=32)] = 12
    work_edge_tokens: int = 2048
    """Predicted prefill + decode tokens from which work is long."""
    work_version: Annotated[int, Meta(ge=0)] = 0
    """Of `work_edges`, which the leader learns; 0 while `work_edge_tokens` is all there is."""
    work_edges: dict[str, int] = {}
    """By model: its own edge, instead of `work_edge_tokens`."""

    @property
    def best_effort_band(self) -> int:
        return self.num_bands

    def work_edge_of(self, model: ModelName) -> int:
        """Tokens from which work of *model* is long."""
        return self.work_edges.get(model, self.work_edge_tokens)


class LaneKey(Value, frozen=True, kw_only=True, order=True):
    """Identity of a lane."""

    layout: int
    model: ModelName
    importance: str
    band: int
    work: str
    """A work class; with the version of its edges when they are learnt, as in `short-3`."""

    @classmethod
    def of(
        cls,
        layout: LaneLayout,
        *,
        model: ModelName,
        importance: Importance,
        band: int,
        work: WorkClass,
    ) -> "LaneKey":
        return cls(
            layout=layout.version,
            model=model,
            importance=importance.value,
            band=band,
            work=f"{work.value}-{layout.work_version}" if layout.work_version else work.value,
        )

    @property
    def lasting(self) -> "LaneKey":
        """The lane of the operator's edges that has the same name but for the version."""
        return msgspec.structs.replace(self, work=self.work.partition("-")[0])

    def _suffix(self) -> str:
        return f"{self.layout}.{_quote(self.model)}.{self.importance}.{self.band}.{self.work}"

    @property
    def queue_name(self) -> str:
        return f"lane.{self._suffix()}"

    @property
    def overflow_name(self) -> str:
        """Companion for tenants above their share; taken when the lane is empty."""
        return f"overflow.{self._suffix()}"

    @property
    def resume_name(self) -> str:
        """Companion for evicted requests of this model and band; taken before the lane."""
        return f"resume.{self.layout}.{_quote(self.model)}.{self.band}"

    @classmethod
    def parse(cls, queue_name: str) -> "LaneKey":
        """
        The key in a lane's or overflow's queue name.

        Raises:
            ContractError: Not such a name.
        """
        parts = queue_name.split(".")
        try:
            kind, layout, model, importance, band, work = parts
            if kind not in ("lane", "overflow"):
                raise ValueError(kind)  # noqa: TRY301 - one refusal for every kind of bad name
            return cls(
                layout=int(layout),
                model=ModelName(unquote(model)),
                importance=Importance(importance).value,
                band=int(band),
                work=_checked_work(work),
            )
        except ValueError as error:
            raise ContractError(f"not a lane name: {queue_name!r}") from error


def relegated_name(model: ModelName) -> str:
    """Companion for requests whose SLO is out of reach; served when there is room."""
    return f"relegated.{_quote(model)}"


def model_of(queue_name: str) -> ModelName | None:
    """The model that a lane or a companion belongs to; None for other queues."""
    parts = queue_name.split(".")
    if parts[0] in ("lane", "overflow", "resume") and len(parts) > 2:  # noqa: PLR2004 - kind, layout, model
        return ModelName(unquote(parts[2]))
    if parts[0] == "relegated":
        return ModelName(unquote(parts[1]))
    return None


def _checked_work(text: str) -> str:
    name, dash, version = text.partition("-")
    WorkClass(name)
    if dash and (not version.isdecimal() or version != str(int(version)) or version == "0"):
        raise ValueError(text)
    return text


def work_version_of(queue_name: str) -> int:
    """Version of the learnt edges that divided a lane from others; 0 for any other queue."""
    if not queue_name.startswith(("lane.", "overflow.")):
        return 0
    version = queue_name.rpartition(".")[2].partition("-")[2]
    return int(version) if version.isdecimal() else 0


def inbox_name(instance_id: str) -> str:
    """Queue of routed mode: requests already bound to one instance."""
    return f"{_INBOX}{_quote(instance_id)}"


def is_inbox(queue: str) -> bool:
    """Whether *queue* is some instance's inbox."""
    return queue.startswith(_INBOX)


def _quote(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")
