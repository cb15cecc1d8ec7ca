"""Converts an HTTP body and headers to a valid request of the mesh."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.gateway.claims import claim_of
from services.gateway.fallbacks import Fallbacks
from services.gateway.headers import Hints
from services.gateway.openai import Body, ChatBody, CompletionBody, decode_body, to_ingress
from services.gateway.settings import Settings
from services.gateway.slo import requested_slo
from shared.api.pooling import check_task
from shared.contracts.base import ModelName, TenantId, UnixTime
from shared.contracts.checks import check_prompt, effective_sampling
from shared.contracts.ends import accepted_ends
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from shared.tenants.policies import Policies, PolicySource
from solver.tenants.claims import grant


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passed every check and can be published."""

    ingress: InferenceRequest
    arrived_at: UnixTime
    stream: bool
    include_usage: bool


class Intake:
    """
    Decodes, validates and tokenizes a request, and sets its id, arrival time and seed.

    Args:
        settings: Limits and default SLOs.
        registry: Registry of the available models.
        tokenizers: One tokenizer per base model.
        fallbacks: Chooses between the models of a split.
        new_seed: Returns a random seed for sampled requests that have none.
        policies: Policies of tenants.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        registry: ModelRegistry,
        tokenizers: dict[ModelName, Tokenizer],
        fallbacks: Fallbacks,
        new_seed: Callable[[], int],
        policies: PolicySource | None = None,
    ) -> None:
        self._policies: PolicySource = policies or Policies()
        self._settings = settings
        self._registry = registry
        self._tokenizers = tokenizers
        self._fallbacks = fallbacks
        self._new_seed = new_seed

    async def add(self, entry: ModelEntry) -> None:
        """Load the tokenizer of a model that is about to be added to the registry."""
        if entry.takes_bodies:
            return
        self._tokenizers[entry.name] = await asyncio.to_thread(Tokenizer.load, Path(entry.path))

    async def replace(self, entry: ModelEntry) -> None:
        """No-op: aliases and adapters have the tokenizer of their base."""

    async def remove(self, model: ModelName) -> None:
        """
        No-op: a thread may still tokenize a prompt. The tokenizer is replaced when a model of the
        name is added again.
        """

    def accept(
        self,
        raw: bytes,
        body_type: type[ChatBody] | type[CompletionBody],
        *,
        hints: Hints,
        tenant: TenantId,
        request_id: str,
        arrived_at: UnixTime,
    ) -> Accepted:
        """
        Check a request body and convert it to the mesh's format.

        The duration is proportional to the body's size, so call it in a thread. Pass the arrival
        time of the request, since the call may wait for a free thread.

        Raises:
            ContractError: The request is invalid; the error has the HTTP status.
        """
        body = decode_body(raw, body_type)
        ref = self._registry.resolve(body.model, request_id)
        ingress = self._with_hints(to_ingress(body), body, hints)
        check_prompt(ingress)
        check_task(ingress, self._registry.entry(ref.base))
        limits = self._settings.limits
        claim = claim_of(ingress, body, hints, limits=limits, arrived_at=arrived_at)
        ends = accepted_ends(ingress, now=arrived_at)
        allowed = grant(claim, self._policies.policy(tenant), tenant)
        ref = self._fallbacks.chosen(
            body.model,
            ref,
            slo=allowed.slo,
            importance=allowed.importance,
            arrived_at=arrived_at,
            num_bytes=len(raw),
        )
        entry = self._registry.entry(ref.base)
        tokens = self._tokenizers[ref.base].encode(body.content, most_tokens=entry.max_model_len)
        if not tokens:
            raise ContractError("the prompt has no tokens", param="prompt")
        ingress = msgspec.structs.replace(
            ingress,
            model=ref.name,
            id=request_id,
            tenant=tenant,
            arrived_at=arrived_at,
            messages=None,
            prompt=tokens,
            prompt_tokens=len(tokens),
            slo=allowed.slo,
            importance=allowed.importance,
            priority=allowed.priority,
            clamped=allowed.clamps,
            service_tier=None,
            expires_at=ends.expires_at,
            ttl_s=None,
            not_before=ends.not_before,
        )
        options = body.stream_options
        return Accepted(
            ingress=self._seeded(ingress, entry, len(tokens)),
            arrived_at=arrived_at,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
        )

    def _seeded(
        self, ingress: InferenceRequest, entry: ModelEntry, prompt_tokens: int
    ) -> InferenceRequest:
        """
        *ingress* with a seed, if it samples and has none.

        Raises:
            ContractError: The prompt and the answer are too long, or two fields contradict each
                other.
        """
        sampling = effective_sampling(
            ingress, entry=entry, prompt_tokens=prompt_tokens, limits=self._settings.limits
        )
        if sampling.temperature == 0 or sampling.seed is not None:
            return ingress
        # A run that repeats the generation after a crash must sample the same tokens.
        return msgspec.structs.replace(ingress, seed=self._new_seed())

    def _with_hints(self, ingress: InferenceRequest, body: Body, hints: Hints) -> InferenceRequest:
        return msgspec.structs.replace(
            ingress,
            slo=requested_slo(body, hints, self._settings),
            deadline=None,
            priority=ingress.priority if hints.priority is None else hints.priority,
            importance=hints.importance or ingress.importance,
            application=hints.application or ingress.application,
            session=hints.session or body.session,
        )


def load_tokenizers(registry: ModelRegistry) -> dict[ModelName, Tokenizer]:
    """
    The tokenizer of every base model.

    Raises:
        SettingsError: A base model has no tokenizer.
    """
    entries = [registry.entry(base) for base in registry.bases]
    return {
        entry.name: Tokenizer.load(Path(entry.path)) for entry in entries if not entry.takes_bodies
    }
