"""
The allow-list of attributes of spans: what leaves the mesh in traces.

Prompts, answers and keys are not in it. Texts of producers that are (model, tenant, application,
request id) are cut to `MAX_CHARS`.
"""

from collections.abc import Mapping
from enum import Enum

from shared.api.calls import COMPLETIONS
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import RequestObserved

MAX_CHARS = 256
AttributeValue = str | int | float | bool | tuple[str, ...]


class Attribute(Enum):
    """An attribute that spans and their events may have; names of OpenTelemetry's conventions."""

    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    ERROR = "error.type"
    """Code of the error, or name of an exception's type."""

    MESSAGING = "messaging.system"
    QUEUE = "messaging.destination.name"

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    MODEL = "gen_ai.request.model"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    SERVED_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

    REQUEST_ID = "headway.request.id"
    TENANT = "headway.tenant"
    APPLICATION = "headway.application"
    QOS_CLASS = "headway.qos_class"
    IMPORTANCE = "headway.importance"
    INSTANCE = "headway.instance"
    HOP = "headway.hop"
    """Number of times that the request was requeued before."""
    DELIVERIES = "headway.deliveries"
    """
    Number of earlier deliveries of the message: each was to a process that ended, or lost its
    connection, while it held the request.
    """
    EARLIER_TOKENS = "headway.earlier_tokens"
    """Number of tokens that earlier runs have generated."""
    OUTCOME = "headway.outcome"
    ATTAINED = "headway.attained"
    """True if all targets of the request were met."""
    REASON = "headway.reason"


Attributes = Mapping[Attribute, AttributeValue]


def exported(attributes: Attributes) -> dict[str, AttributeValue]:
    """The attributes to export: those of the allow-list, with long texts cut."""
    return {
        key.value: value[:MAX_CHARS] if isinstance(value, str) else value
        for key, value in attributes.items()
        if isinstance(key, Attribute)
    }


def operation_of(request: QueuedRequest) -> str:
    """What is asked for, in the words of the conventions for generative AI."""
    if request.pools:
        return "embeddings"
    call = request.call
    is_chat = request.messages is not None if call is None else call.endpoint != COMPLETIONS
    return "chat" if is_chat else "text_completion"


def admitted(request: QueuedRequest) -> dict[Attribute, AttributeValue]:
    """Attributes of whose request it is, and how it is queued."""
    return {
        Attribute.MODEL: request.model.name,
        Attribute.REQUEST_ID: request.request_id,
        Attribute.TENANT: request.tenant,
        Attribute.APPLICATION: request.application,
        Attribute.QOS_CLASS: request.slo.qos_class.value,
        Attribute.IMPORTANCE: request.importance.value,
    }


def asked(request: QueuedRequest) -> dict[Attribute, AttributeValue]:
    """
    Attributes of what a request asks an engine for.

    Only the spans of engines have them: by OpenTelemetry's conventions, a span with the name of an
    operation of generative AI is one call of a model.
    """
    return admitted(request) | {
        Attribute.OPERATION: operation_of(request),
        Attribute.PROVIDER: "headway",
        Attribute.MAX_TOKENS: request.sampling.max_tokens,
    }


def answered(observed: RequestObserved, num_tokens: int) -> dict[Attribute, AttributeValue]:
    """
    Attributes of the end of a request.

    Args:
        observed: The end, of a whole answer or a failure.
        num_tokens: Number of tokens of all answers.
    """
    reason = observed.finish_reason
    finished = {} if reason is None else {Attribute.FINISH_REASONS: (reason.value,)}
    return {
        Attribute.SERVED_MODEL: observed.model,
        **finished,
        Attribute.INPUT_TOKENS: observed.prompt_tokens,
        Attribute.OUTPUT_TOKENS: num_tokens,
        Attribute.CACHED_TOKENS: observed.cached_tokens,
        Attribute.ATTAINED: observed.attained,
    }
