"""Lanes and their queue names. The layout of lanes is versioned data."""

import re
from typing import Annotated
from urllib.parse import quote, unquote

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, ModelName, Seconds, Value
from shared.contracts.errors import ContractError
from shared.contracts.qos import Importance

_INBOX = "inbox."
_WORK = re.compile(r"w(0|[1-9]\d?)|(short|long)(-[1-9]\d*)?")


class LaneLayout(Value, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Division of requests into lanes. Lanes of old versions drain while lanes of the new version
    fill.

    Deadline band b contains requests with a time left at ingest in [first_band_s·ratio^(b-1),
    first_band_s·ratio^b). Band 0 contains sooner deadlines; band `num_bands` is best effort.

    Work class k contains requests with predicted prefill plus decode tokens in
    (first_work_tokens·ratio^(k-1), first_work_tokens·ratio^k]. Class 0 contains smaller requests,
    the last class larger ones.
    """

    version: Annotated[int, Meta(ge=1)] = 2
    first_band_s: Seconds = 0.5
    band_ratio: Annotated[float, Meta(gt=1)] = 2.5
    num_bands: Annotated[int, Meta(ge=1, le=32)] = 12
    first_work_tokens: Annotated[int, Meta(ge=1)] = 400
    work_ratio: Annotated[float, Meta(gt=1)] = 1.5
    num_work_classes: Annotated[int, Meta(ge=1, le=32)] = 10

    @property
    def best_effort_band(self) -> int:
        return self.num_bands


class QueuesListed(Message, frozen=True, kw_only=True, omit_defaults=True, tag="queues.listed.v1"):
    """Names in the durable list of the work queues that exist (`shared/broker/queue_list.py`)."""

    queues: tuple[str, ...]
    complete: bool = False
    """
    True if this and the other messages have all names: a leader has counted the queues, or the
    broker is new. Publishers of requests add single names.
    """


class LaneKey(Value, frozen=True, kw_only=True, order=True):
    """Identity of a lane."""

    layout: int
    model: ModelName
    importance: str
    band: int
    work: str
    """
    Work class of the lane, e.g. `w3`. Version 1 has `short` and `long`, possibly with a number.
    """

    @classmethod
    def of(
        cls, layout: LaneLayout, *, model: ModelName, importance: Importance, band: int, work: int
    ) -> "LaneKey":
        return cls(
            layout=layout.version,
            model=model,
            importance=importance.value,
            band=band,
            work=f"w{work}",
        )

    def _suffix(self) -> str:
        return f"{self.layout}.{_quote(self.model)}.{self.importance}.{self.band}.{self.work}"

    @property
    def queue_name(self) -> str:
        return f"lane.{self._suffix()}"

    @property
    def overflow_name(self) -> str:
        """
        Companion queue for requests of tenants above their share; served when the lane is empty.
        """
        return f"overflow.{self._suffix()}"

    @property
    def resume_name(self) -> str:
        """
        Companion queue for evicted requests of one model and deadline band; served before the lane.
        """
        return f"resume.{self.layout}.{_quote(self.model)}.{self.band}"

    @classmethod
    def parse(cls, queue_name: str) -> "LaneKey":
        """
        Parse the queue name of a lane or of its overflow queue.

        Raises:
            ContractError: The name is not the name of a lane.
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
    """
    Companion queue for requests whose SLO cannot be met; the queue is served when there is room.
    """
    return f"relegated.{_quote(model)}"


def model_of(queue_name: str) -> ModelName | None:
    """Model of a lane or companion queue; None for other queues."""
    parts = queue_name.split(".")
    if parts[0] in ("lane", "overflow", "resume") and len(parts) > 2:  # noqa: PLR2004 - kind, layout, model
        return ModelName(unquote(parts[2]))
    if parts[0] == "relegated":
        return ModelName(unquote(parts[1]))
    return None


def _checked_work(text: str) -> str:
    if _WORK.fullmatch(text) is None:
        raise ValueError(text)
    return text


def inbox_name(instance_id: str) -> str:
    """Inbox: queue of the requests that routers have sent to one instance."""
    return f"{_INBOX}{_quote(instance_id)}"


def is_inbox(queue: str) -> bool:
    """True if *queue* is the inbox of an instance."""
    return queue.startswith(_INBOX)


def owner_of(inbox: str) -> InstanceId:
    """Id of the instance with this inbox."""
    return InstanceId(unquote(inbox.removeprefix(_INBOX)))


def _quote(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")
