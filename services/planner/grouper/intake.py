"""Converts an ingress body to a queued request, or refuses the body with the invalid field."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from services.planner.grouper.calls import (
    Asked,
    asked_call,
    call_of_item,
    call_sampling,
    plain_call,
    refuse_beside_body,
    served_call,
    with_model,
)
from services.planner.grouper.identities import (
    Probe,
    id_of,
    is_idempotent,
    is_storable,
    probe_of,
)
from services.planner.settings import GrouperSettings
from shared.api.calls import ALL_ENDPOINTS, CallSize
from shared.api.digests import body_digest
from shared.api.pooling import NO_SAMPLING, check_generates
from shared.api.unsupported import UnsupportedFields, refuse_unsupported
from shared.broker.protocol import Delivery
from shared.contracts.base import Decoder, RequestId, Seconds, TenantId, UnixTime, hinted
from shared.contracts.checks import (
    check_body_size,
    check_prompt,
    effective_importance,
    effective_sampling,
    effective_slo,
    prompt_text,
)
from shared.contracts.ends import Ends, effective_ends
from shared.contracts.errors import ContractError
from shared.contracts.ingress import (
    DIGEST_HEADER,
    IDEMPOTENT_HEADER,
    CallRequest,
    InferenceRequest,
    QueueItem,
    RequestedTargets,
)
from shared.contracts.lanes import LaneLayout
from shared.contracts.models import ModelEntry
from shared.contracts.qos import OnLate
from shared.contracts.requests import (
    ModelRef,
    QueuedRequest,
    ReplyMode,
    Sampling,
    StoredWork,
)
from shared.contracts.telemetry import RequestObserved
from shared.models.registry import ModelRegistry
from shared.tenants.policies import Policies, PolicySource
from shared.tracing.context import trace_of
from solver.planning.lanes import lane_for
from solver.prediction.lengths.predicted_work import PredictedWork
from solver.prediction.lengths.prompt_lengths import PromptLengths
from solver.tenants.claims import Claim, Granted, grant

_decode_body: Decoder[InferenceRequest] = Decoder(InferenceRequest)
_decode_call: Decoder[CallRequest] = Decoder(CallRequest)
_decode_item: Decoder[QueueItem] = Decoder(QueueItem)
_check_targets: Decoder[RequestedTargets] = Decoder(RequestedTargets)
_decode_unsupported: Decoder[msgspec.Struct] = Decoder(UnsupportedFields)


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
    """Predicts the lengths of answers, which are a part of the work that determines lanes."""
    policies: PolicySource = field(default_factory=Policies)
    """Policies of tenants, which grant targets, importance and priority."""
    finals_kept_s: Seconds | None = None
    """
    Time for which the store keeps finals of requests whose ids mean something; None: no store.
    """

    def accept(
        self,
        delivery: Delivery,
        now: UnixTime,
        is_late: Callable[[QueuedRequest], bool] = lambda _request: False,
    ) -> QueuedRequest:
        """
        Return the request in *delivery*, classified for its lane.

        The arrival time of a trusted publisher is used, so that waiting in a global queue counts. A
        future time is replaced by now. An old time is accepted, since durable requests may wait for
        days.

        The arrival time for other publishers is now. The true time of publication is unknown, and
        an old arrival time would give priority over requests with shorter targets.

        Args:
            delivery: The message.
            now: Unix seconds.
            is_late: Returns whether a request would probably be late; then it goes to the fallback
                of its split, if it has one.

        Raises:
            ModelNotReadyError: The model was added to the registry a moment ago.
            ContractError: The body is invalid; the message names the field and its limit.
        """
        limits = self.settings.limits
        check_body_size(delivery.body, limits)
        probe = probe_of(delivery.body)
        asked = self._asked(delivery, probe)
        body = asked.body
        claimed_at = body.arrived_at
        trusted = self._is_trusted(delivery)
        if not trusted:
            body = msgspec.structs.replace(body, arrived_at=None, prompt_tokens=None, clamped=())
        if asked.call is None:
            check_prompt(body)
        asked = Asked(body, asked.call, asked.size)
        request_id = id_of(delivery, probe)
        model = self._model(body.model, request_id, trusted=trusted)
        # An early arrival shortens the time to an end, so that anyone may state it.
        begun_at = now if claimed_at is None else min(now, claimed_at)
        ends = effective_ends(
            body, arrived_at=begun_at, now=now, expiration_s=delivery.expiration_s
        )
        request = self._queued(
            delivery, asked, request_id=request_id, model=model, ends=ends, now=now
        )
        fallback = self._fallback(asked)
        if fallback is not None and fallback != model and is_late(request):
            return self._queued(
                delivery, asked, request_id=request_id, model=fallback, ends=ends, now=now
            )
        return request

    def regrouped(self, request: QueuedRequest, now: UnixTime) -> QueuedRequest:
        """
        A request that was held, classified for its lane now.

        Raises:
            ContractError: Its model was removed meanwhile.
        """
        model = request.model.base
        if model not in self.registry.bases:
            raise ContractError(
                f"model {request.model.name} was removed while the request was held",
                code="model_not_found",
                param="model",
                status=404,
            )
        return msgspec.structs.replace(self._in_lane(request, now), grouped_at=now)

    def _fallback(self, asked: Asked) -> ModelRef | None:
        """
        The model of a request that would be late on its target; None for a request whose prompt
        consists of the target's tokens.
        """
        split = self.registry.split(asked.body.model)
        if split is None or split.fallback is None or isinstance(asked.body.prompt, tuple):
            return None
        return self.registry.resolve(split.fallback)

    def _queued(
        self,
        delivery: Delivery,
        asked: Asked,
        *,
        request_id: RequestId,
        model: ModelRef,
        ends: Ends,
        now: UnixTime,
    ) -> QueuedRequest:
        """The request for *model*, classified for its lane."""
        entry = self.registry.entry(model.base)
        served = self._served(asked, model, entry)
        body, call, size = served.body, served.call, served.size
        arrived_at = now if body.arrived_at is None else min(now, body.arrived_at)
        if body.not_before is not None:
            arrived_at = max(arrived_at, body.not_before)  # targets count from this time
        begins_at = max(now, arrived_at)
        tenant = self._tenant(delivery, body)
        allowed = self._granted(body, tenant, arrived_at, begins_at)
        is_whole = entry.pools or (call is not None and call.pools)
        slo = allowed.slo.at_once if is_whole else allowed.slo
        prompt_tokens = self._prompt_tokens(body, size, entry)
        sampling = self._sampling(body, size, entry, prompt_tokens)
        trace = trace_of(delivery.headers)
        request = QueuedRequest(
            request_id=request_id,
            model=model,
            prompt=body.prompt if call is None else None,
            messages=body.messages if call is None else None,
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            slo=slo,
            arrived_at=arrived_at,
            grouped_at=now,
            tenant=tenant,
            application=body.application or "default",
            session=body.session,
            importance=allowed.importance,
            priority=allowed.priority,
            lane="",
            reply_to=delivery.reply_to,
            reply_mode=body.reply or ReplyMode.STREAM,
            traceparent=None if trace is None else trace.traceparent,
            tracestate=None if trace is None else trace.tracestate,
            call=call,
            expires_at=ends.expires_at,
            on_late=ends.on_late or self.settings.on_late.get(slo.qos_class, OnLate.SERVE),
            clamped=body.clamped + allowed.clamps,
            stored=self._stored(delivery, request_id),
        )
        expected_tokens = self.work.answer_tokens(request)
        request = msgspec.structs.replace(request, expected_tokens=expected_tokens)
        return self._in_lane(request, begins_at)

    def _served(self, asked: Asked, model: ModelRef, entry: ModelEntry) -> Asked:
        """
        The request in the form that instances of *model* take.

        Raises:
            ContractError: The model does not serve such requests.
        """
        body, call, size = asked.body, asked.call, asked.size
        if entry.takes_bodies and call is None:
            plain = plain_call(body, self.settings.limits)
            call, size = plain.call, plain.size
        if call is None or size is None or entry.takes_bodies:
            check_generates(entry)
        else:
            call = served_call(call, size, entry)
        if call is not None and model.name != body.model:
            call = msgspec.structs.replace(call, body=with_model(call.body, model.name))
        return Asked(body, call, size)

    def _in_lane(self, request: QueuedRequest, begins_at: UnixTime) -> QueuedRequest:
        """Copy of *request* with its lane, if it may begin at *begins_at*."""
        lane = lane_for(
            model=request.model.base,
            importance=request.importance,
            time_left_s=request.deadline_at - begins_at,
            work_tokens=request.prompt_tokens + request.answer_tokens,
            layout=self.layout,
        )
        return msgspec.structs.replace(request, lane=lane.queue_name)

    def _granted(
        self, body: InferenceRequest, tenant: TenantId, arrived_at: UnixTime, now: UnixTime
    ) -> Granted:
        """
        Targets, importance and priority that the policy of the tenant grants.

        Raises:
            ContractError: A target is invalid, or the policy refuses what the request claims.
        """
        claim = Claim(
            slo=effective_slo(body, now=now, limits=self.settings.limits),
            importance=effective_importance(body),
            priority=body.priority,
            arrived_at=arrived_at,
            sets_slo=body.slo is not None or body.deadline is not None,
            sets_importance=body.importance is not None or body.service_tier == "priority",
        )
        return grant(claim, self.policies.policy(tenant), tenant)

    def _stored(self, delivery: Delivery, request_id: RequestId) -> StoredWork | None:
        """
        What the store has to know of a request whose id means something; None for others.

        Raises:
            ContractError: The header is invalid, the message has no id, or the planner has no
                store.
        """
        if not is_idempotent(delivery):
            return None
        if self.finals_kept_s is None:
            raise ContractError(
                f"header {IDEMPOTENT_HEADER} needs a store: set store.data_dir or store.url of the "
                "planner",
                code="store_not_configured",
                status=501,
            )
        if not (delivery.message_id or probe_of(delivery.body).id):
            raise ContractError(
                f"header {IDEMPOTENT_HEADER} needs a message_id, or an id in the body", param="id"
            )
        if not is_storable(delivery, request_id):
            raise ContractError(
                f"with header {IDEMPOTENT_HEADER}, the id and reply_to may have no NUL characters",
                param="id",
            )
        digest = _header(delivery, DIGEST_HEADER) if self._is_trusted(delivery) else None
        return StoredWork(digest=digest or body_digest(delivery.body), kept_s=self.finals_kept_s)

    def stored_tenant(self, delivery: Delivery) -> TenantId | None:
        """Tenant of a message whose refusal the store may have to keep; None for others."""
        try:
            if self.finals_kept_s is None or not is_idempotent(delivery):
                return None
            request_id = id_of(delivery, probe_of(delivery.body))
        except ContractError:  # an unreadable message was never stored
            return None
        return self.claimed_tenant(delivery) if is_storable(delivery, request_id) else None

    def claimed_tenant(self, delivery: Delivery) -> TenantId:
        """Tenant of a message, even if its body is invalid."""
        named = None
        if self._is_trusted(delivery):
            with suppress(ContractError):
                named = probe_of(delivery.body).tenant
        if isinstance(named, str) and named:
            return TenantId(named)
        return TenantId(delivery.user_id or self.settings.anonymous_tenant)

    def _is_trusted(self, delivery: Delivery) -> bool:
        return delivery.user_id in self.settings.trusted_users

    def _model(self, name: str, request_id: RequestId, *, trusted: bool) -> ModelRef:
        """
        The model of a name. A trusted publisher has checked the name already, so a model that was
        removed since then counts.

        Raises:
            ModelNotReadyError: The model was added to the registry a moment ago.
            ContractError: The name is unknown.
        """
        removed = self.registry.removed(name) if trusted else None
        return removed or self.registry.resolve(name, request_id)

    def _asked(self, delivery: Delivery, probe: Probe) -> Asked:
        """The request in a delivery, in one of its three forms."""
        if probe.is_item:
            if self.settings.calls_of_items and probe.endpoint in ALL_ENDPOINTS:
                return asked_call(call_of_item(delivery.body), self.settings.limits)
            return Asked(self._item(delivery))
        _check_targets(delivery.body)
        if probe.endpoint is None:
            refuse_unsupported(_decode_unsupported(delivery.body))
            return Asked(_decode_body(delivery.body))
        refuse_beside_body(delivery.body)
        return asked_call(_decode_call(delivery.body), self.settings.limits)

    def _item(self, delivery: Delivery) -> InferenceRequest:
        item = _decode_item(delivery.body)
        try:
            msgspec.convert(item.payload, RequestedTargets)
            refuse_unsupported(msgspec.convert(item.payload, UnsupportedFields))
            body = msgspec.convert(item.payload, InferenceRequest)
        except msgspec.ValidationError as error:
            message = f"payload violates its schema: {hinted(str(error))}"
            raise ContractError(message, param="payload") from error
        return msgspec.structs.replace(
            body,
            id=item.id,
            deadline=item.deadline if item.deadline is not None else body.deadline,
            reply=body.reply or ReplyMode.FINAL,
        )

    def _sampling(
        self,
        body: InferenceRequest,
        size: CallSize | None,
        entry: ModelEntry,
        prompt_tokens: int,
    ) -> Sampling:
        """Sampling of a request, with a seed if it is random."""
        if entry.pools:
            return NO_SAMPLING
        if size is not None:
            sampling = call_sampling(size, entry=entry, prompt_tokens=prompt_tokens)
        else:
            sampling = effective_sampling(
                body, entry=entry, prompt_tokens=prompt_tokens, limits=self.settings.limits
            )
        if sampling.temperature > 0 and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(31))
        return sampling

    def _prompt_tokens(
        self, body: InferenceRequest, size: CallSize | None, entry: ModelEntry
    ) -> int:
        """
        Prompt length in tokens: from a trusted publisher, else exact, else a capped prediction.
        """
        if body.prompt_tokens is not None:
            return body.prompt_tokens
        text = prompt_text(body) if size is None else size.text
        if text is None:
            return len(body.prompt or ()) if size is None else max(1, size.prompt_tokens)
        predicted = self.lengths.tokens(entry.name, text, bytes_per_token=entry.bytes_per_token)
        # Only the serving instance counts exactly. A predicted prompt length must neither limit the
        # answer nor refuse the request.
        limits = self.settings.limits
        answer = body.max_completion_tokens or body.max_tokens or limits.default_max_tokens
        if entry.pools:
            answer = 0
        num_prompts = 1 if size is None else size.num_prompts
        return min(predicted, num_prompts * max(1, entry.max_model_len - answer))

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

    def _tenant(self, delivery: Delivery, body: InferenceRequest) -> TenantId:
        if self._is_trusted(delivery):
            return TenantId(body.tenant or delivery.user_id or self.settings.anonymous_tenant)
        return TenantId(delivery.user_id or self.settings.anonymous_tenant)


def _header(delivery: Delivery, name: str) -> str | None:
    value = delivery.headers.get(name)
    return value if isinstance(value, str) else None
