"""Records of finished requests in memory, bounded by age, number and size."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.contracts.base import Decoder, InstanceId, RequestId, TenantId, UnixTime, encode
from shared.contracts.requests import MAX_HISTORY, HistoryEntry
from shared.contracts.stories.questions import HeldRequest, StoriesReported, StoriesRequested
from shared.contracts.stories.story import COMPLETED, PulledRequest, RequeuedRequest, Story
from solver.stories.lost_pulls import Pull, with_lost_pulls

_decode: Decoder[Story] = Decoder(Story)
Key = tuple[TenantId, RequestId]


class ShelfSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the records of finished requests that are kept for operators."""

    kept_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Age from which records are dropped."""
    max_records: Annotated[int, Meta(ge=1)] = 10_000
    """Maximum number of records, and of requests without an end whose pulls are remembered."""
    max_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024 * 1024
    """Maximum size of the records, encoded."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One record; encoded, it takes a tenth of the memory."""

    finished_at: UnixTime
    is_late: bool
    body: bytes


@dataclass(slots=True)
class _Open:
    """What is known of a request without an end."""

    pulls: list[Pull] = field(default_factory=list)
    steps: list[HistoryEntry] = field(default_factory=list)


@dataclass(slots=True)
class Shelf:
    """
    The last finished requests of all tenants, and the pulls and steps of requests without an end.

    Args:
        settings: Bounds.
        heard_since: Time from which this process hears of ends.
    """

    settings: ShelfSettings
    heard_since: UnixTime
    num_bytes: int = 0
    _kept: "OrderedDict[Key, _Kept]" = field(default_factory=OrderedDict)
    """Oldest first."""
    _open: "OrderedDict[Key, _Open]" = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kept)

    def pulled(self, request: PulledRequest, instance_id: InstanceId) -> None:
        """Record that an instance has pulled a request."""
        opened = self._opened(request.tenant, request.request_id)
        opened.pulls = [*opened.pulls[-MAX_HISTORY:], (instance_id, request.at)]

    def requeued(self, request: RequeuedRequest) -> None:
        """Record that an instance has returned a request to a queue."""
        opened = self._opened(request.tenant, request.request_id)
        opened.steps = [*opened.steps[1 - MAX_HISTORY :], request.step]

    def ended(self, story: Story, now: UnixTime) -> None:
        """
        Keep a record. A request that ran twice ends twice: the record of its first answer stays.
        """
        key = (story.tenant, story.request_id)
        known = self.find(*key)
        is_same = known is not None and known.arrived_at == story.arrived_at
        if is_same and known is not None and known.outcome == COMPLETED:
            return
        self._drop(key)
        opened = self._open.pop(key, _Open())
        if opened.steps and not story.history:  # a grouper does not know what instances did
            story = msgspec.structs.replace(story, history=tuple(opened.steps))
        story = with_lost_pulls(story, opened.pulls)
        kept = _Kept(story.finished_at, story.is_late, encode(story))
        self._kept[key] = kept
        self.num_bytes += len(kept.body)
        self.trim(now)

    def trim(self, now: UnixTime) -> None:
        """Drop records beyond the bounds."""
        settings = self.settings
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            is_beyond = len(self._kept) > settings.max_records or (
                self.num_bytes > settings.max_bytes
            )
            if not is_beyond and oldest.finished_at >= now - settings.kept_s:
                return
            self.heard_since = max(self.heard_since, min(oldest.finished_at, now))
            self._drop(key)

    def find(self, tenant: TenantId, request_id: RequestId) -> Story | None:
        """The record of a request; None if there is none."""
        kept = self._kept.get((tenant, request_id))
        return None if kept is None else _decode(kept.body)

    def answer(self, asked: StoriesRequested, now: UnixTime) -> StoriesReported:
        """The records that a question is about, newest first."""
        self.trim(now)
        return StoriesReported(
            stories=tuple(_decode(kept.body) for kept in islice(self._found(asked), asked.limit)),
            held=() if asked.request_id is None else tuple(self._held(asked)),
            heard_since=max(self.heard_since, now - self.settings.kept_s),
            kept_s=self.settings.kept_s,
        )

    def _found(self, asked: StoriesRequested) -> Iterator[_Kept]:
        for (tenant, request_id), kept in reversed(self._kept.items()):
            if asked.request_id not in (None, request_id) or asked.tenant not in (None, tenant):
                continue
            if kept.finished_at >= asked.since and (kept.is_late or not asked.only_late):
                yield kept

    def _held(self, asked: StoriesRequested) -> Iterator[HeldRequest]:
        for (tenant, request_id), opened in self._open.items():
            is_asked = request_id == asked.request_id and asked.tenant in (None, tenant)
            if is_asked and opened.pulls:
                instance_id, at = opened.pulls[-1]
                yield HeldRequest(tenant=tenant, instance_id=instance_id, at=at)

    def _opened(self, tenant: TenantId, request_id: RequestId) -> _Open:
        opened = self._open.setdefault((tenant, request_id), _Open())
        if len(self._open) > self.settings.max_records:
            self._open.popitem(last=False)
        return opened

    def _drop(self, key: Key) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self.num_bytes -= len(kept.body)
