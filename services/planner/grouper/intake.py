"""Converts an ingress body to a queued request, or refuses the body with the invalid field."""

import math
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.planner.settings import GrouperSettings
from shared.broker.protocol import Delivery
from shared.contracts.base import Decoder, RequestId, TenantId, UnixTime
from shared.contracts.checks import (
    check_body_size,
    check_prompt,
    effective_importance,
    effective_sampling,
    effective_slo,
    prompt_text,
)
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest, QueueItem, RequestedTargets
from shared.contracts.lanes import LaneLayout
from shared.contracts.models import ModelEntry
from shared.contracts.requests import QueuedRequest, ReplyMode
from shared.contracts.telemetry import RequestObserved
from shared.contracts.unsupported import UnsupportedFields, refuse_unsupported
from shared.models.registry import ModelRegistry
from solver.planning.lanes import lane_for
from solver.prediction.lengths.predicted_work import PredictedWork
from solver.prediction.lengths.prompt_lengths import PromptLengths

MAX_ID_BYTES = 128
_decode_body: Decoder[InferenceRequest] = Decoder(InferenceRequest)
_decode_item: Decoder[QueueItem] = Decoder(QueueItem)
_check_targets: Decoder[RequestedTargets] = Decoder(RequestedTargets)
_decode_unsupported: Decoder[msgspec.Struct] = Decoder(UnsupportedFields)


class _Probe(msgspec.Struct):
    """Fields that are needed to answer a request, even if its body is invalid."""

    id: Any = None
    payload: Any = None


_decode_probe: Decoder[_Probe] = Decoder(_Probe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """
    Validates and classifies messages.

    For equal messages, only new ids and seeds differ between two calls.
    """

    registry: ModelRegistry
    settings: GrouperSettings
    layout: LaneLayout
    lengths: PromptLengths
    """Model that predicts the token count of prompts that arrive as text."""
    work: PredictedWork = field(default_factory=PredictedWork)
    """Predicts the work of a request, which determines the request's lane."""

    def accept(self, delivery: Delivery, now: UnixTime) -> QueuedRequest:
        """
        Return the request in *delivery*, classified for its lane.

        The arrival time of a trusted publisher is used, so that waiting in a global queue counts. A
        future time is replaced by now. An old time is accepted, since durable requests may wait for
        days.

        The arrival time for other publishers is now. The true time of publication is unknown, and
        an old arrival time would give priority over requests with shorter targets.

        Raises:
            ContractError: The body is invalid; the message names the field and its limit.
        """
        limits = self.settings.limits
        check_body_size(delivery.body, limits)
        body = self._body(delivery)
        trusted = delivery.user_id in self.settings.trusted_users
        if not trusted:
            body = msgspec.structs.replace(body, arrived_at=None, prompt_tokens=None, engine=None)
        check_prompt(body)
        model = self.registry.resolve(body.model)
        entry = self.registry.entry(model.base)
        arrived_at = now if body.arrived_at is None else min(now, body.arrived_at)
        slo = effective_slo(body, now=now, limits=limits)
        prompt_tokens = self._prompt_tokens(body, entry)
        sampling = effective_sampling(body, entry=entry, prompt_tokens=prompt_tokens, limits=limits)
        if sampling.temperature > 0 and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(31))
        importance = effective_importance(body)
        deadline_at = slo.planning_deadline_at(arrived_at)
        request = QueuedRequest(
            request_id=request_id_of(delivery),
            model=model,
            prompt=body.prompt,
            messages=body.messages,
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            slo=slo,
            arrived_at=arrived_at,
            grouped_at=now,
            tenant=self._tenant(delivery, body, trusted=trusted),
            application=body.application or "default",
            importance=importance,
            priority=body.priority,
            lane="",
            reply_to=delivery.reply_to,
            reply_mode=body.reply or ReplyMode.STREAM,
            traceparent=_header(delivery, "traceparent"),
            payload=body.engine,
        )
        lane = lane_for(
            model=model.base,
            importance=importance,
            time_left_s=deadline_at - now if math.isfinite(deadline_at) else math.inf,
            work_tokens=self.work.tokens(request),
            layout=self.layout,
        )
        return msgspec.structs.replace(request, lane=lane.queue_name)

    def _body(self, delivery: Delivery) -> InferenceRequest:
        if _decode_probe(delivery.body).payload is None:
            _check_targets(delivery.body)
            refuse_unsupported(_decode_unsupported(delivery.body))
            return _decode_body(delivery.body)
        item = _decode_item(delivery.body)
        try:
            msgspec.convert(item.payload, RequestedTargets)
            refuse_unsupported(msgspec.convert(item.payload, UnsupportedFields))
            body = msgspec.convert(item.payload, InferenceRequest)
        except msgspec.ValidationError as error:
            raise ContractError(f"payload violates its schema: {error}", param="payload") from error
        return msgspec.structs.replace(
            body,
            id=item.id,
            deadline=item.deadline if item.deadline is not None else body.deadline,
            reply=body.reply or ReplyMode.FINAL,
        )

    def _prompt_tokens(self, body: InferenceRequest, entry: ModelEntry) -> int:
        """
        Prompt length in tokens: from a trusted publisher, else exact, else a capped prediction.
        """
        if body.prompt_tokens is not None:
            return body.prompt_tokens
        text = prompt_text(body)
        if text is None:
            return len(body.prompt or ())
        predicted = self.lengths.tokens(entry.name, text, bytes_per_token=entry.bytes_per_token)
        # Only the serving instance, which counts exactly, may limit the answer or refuse the
        # request; a predicted prompt length must do neither.
        limits = self.settings.limits
        answer = body.max_completion_tokens or body.max_tokens or limits.default_max_tokens
        return min(predicted, max(1, entry.max_model_len - answer))

    def learn(self, observed: RequestObserved) -> None:
        """
        Learn from an exact prompt length; a length for a model outside the registry is ignored.
        """
        text = observed.prompt_text
        if text is None or observed.model not in self.registry.bases:
            return
        self.lengths.observe(
            observed.model,
            text,
            observed.prompt_tokens,
            bytes_per_token=self.registry.entry(observed.model).bytes_per_token,
        )

    def _tenant(self, delivery: Delivery, body: InferenceRequest, *, trusted: bool) -> TenantId:
        if trusted:
            return TenantId(body.tenant or delivery.user_id or self.settings.anonymous_tenant)
        return TenantId(delivery.user_id or self.settings.anonymous_tenant)


def _header(delivery: Delivery, name: str) -> str | None:
    value = delivery.headers.get(name)
    return value if isinstance(value, str) else None


def request_id_of(delivery: Delivery) -> RequestId:
    """Request id with which *delivery* is answered, even if its body is invalid."""
    try:
        probe = _decode_probe(delivery.body)
    except ContractError:
        probe = _Probe()
    body_id = probe.id if isinstance(probe.id, str) and probe.id else None
    known = body_id or delivery.message_id or delivery.correlation_id
    if not known:
        return RequestId(f"req-{secrets.token_hex(12)}")
    # In bytes: it becomes part of a message id, which AMQP limits to 255 bytes.
    return RequestId(known.encode()[:MAX_ID_BYTES].decode(errors="ignore"))
