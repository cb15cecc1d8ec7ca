"""AsyncAPI document of the producer interface: `python -m ops.generate.asyncapi`."""

import json
import sys
from typing import Any

import msgspec

from shared.broker import topology
from shared.contracts.base import Message, tag_of
from shared.contracts.control import RequestCancel, RunStop
from shared.contracts.ingress import CallRequest, InferenceRequest, QueueItem
from shared.contracts.requests import (
    RequestCompleted,
    RequestFailed,
    RunStarted,
    TokensEmitted,
)
from shared.contracts.stored import RequestAsked, RequestStatus

ASYNCAPI_VERSION = "3.0.0"
CONTRACT_VERSION = "1.0.0"

REQUESTS: tuple[type[msgspec.Struct], ...] = (InferenceRequest, CallRequest, QueueItem)
REPLIES: tuple[type[Message], ...] = (RunStarted, TokensEmitted, RequestCompleted, RequestFailed)
CONTROLS: tuple[type[Message], ...] = (RunStop, RequestCancel, RequestAsked)
ANSWERS: tuple[type[Message], ...] = (RequestStatus,)

Document = dict[str, Any]


def document() -> Document:
    """
    Describe the mesh as an AsyncAPI application: it receives requests and controls, sends replies.
    """
    every = (*REQUESTS, *REPLIES, *CONTROLS, *ANSWERS)
    _, schemas = msgspec.json.schema_components(every, ref_template="#/components/schemas/{name}")
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "Headway",
            "version": CONTRACT_VERSION,
            "description": (
                "Publish requests with confirms and `mandatory`, with the same `message_id` on "
                "every retry; with the header `x-headway-idempotent` a retry is never a second "
                "request. Unknown fields are ignored; invalid fields are refused with "
                "`request.failed`. Replies are delivered at least once. The first successful final "
                "completes a request; a final contains all data of the request's token batches."
            ),
        },
        "defaultContentType": "application/json",
        "channels": {
            "requests": _channel(
                topology.REQUESTS,
                REQUESTS,
                kind="topic",
                description=(
                    "Routing key `interactive` or `interactive.<anything>` for requests with a "
                    "first-token target, any other key for other requests."
                ),
            ),
            "replies": _channel(
                None,
                (*REPLIES, *ANSWERS),
                kind="direct",
                description=(
                    "The producer's own queue, named `reply.<anything>`, bound to "
                    f"`{topology.REPLIES}` under its own name and given as `reply_to`. Producers "
                    "must ignore messages of unknown kinds."
                ),
            ),
            "control": _channel(
                topology.CONTROL,
                CONTROLS,
                kind="topic",
                description=(
                    f"Routing key `{topology.CONTROL_CANCEL}` cancels a request; "
                    "`instance.<instance_id>` stops one run of a request; "
                    f"`{topology.CONTROL_REQUEST}` asks about a stored request."
                ),
            ),
        },
        "operations": {
            "receiveRequest": {
                "action": "receive",
                "channel": {"$ref": "#/channels/requests"},
                "messages": _refs("requests", REQUESTS),
                "reply": {
                    "address": {"location": "$message.header#/reply_to"},
                    "channel": {"$ref": "#/channels/replies"},
                    "messages": _refs("replies", REPLIES),
                },
            },
            "sendReply": {
                "action": "send",
                "channel": {"$ref": "#/channels/replies"},
                "messages": _refs("replies", REPLIES),
            },
            "receiveControl": {
                "action": "receive",
                "channel": {"$ref": "#/channels/control"},
                "messages": _refs("control", CONTROLS),
            },
            "sendStatus": {
                "action": "send",
                "channel": {"$ref": "#/channels/replies"},
                "messages": _refs("replies", ANSWERS),
            },
        },
        "components": {
            "messages": {message.__name__: _message(message) for message in every},
            "schemas": schemas,
        },
    }


def _channel(
    exchange: str | None, messages: tuple[type[msgspec.Struct], ...], *, kind: str, description: str
) -> Document:
    return {
        "address": exchange,
        "description": description,
        "messages": {
            message.__name__: {"$ref": f"#/components/messages/{message.__name__}"}
            for message in messages
        },
        "bindings": {
            "amqp": {
                "is": "routingKey",
                "exchange": {
                    "name": exchange or topology.REPLIES,
                    "type": kind,
                    "durable": True,
                    "autoDelete": False,
                },
                "bindingVersion": "0.3.0",
            }
        },
    }


def _refs(channel: str, messages: tuple[type[msgspec.Struct], ...]) -> list[Document]:
    return [{"$ref": f"#/channels/{channel}/messages/{message.__name__}"} for message in messages]


def _message(message: type[msgspec.Struct]) -> Document:
    described: Document = {
        "name": tag_of(message) if issubclass(message, Message) else message.__name__,
        "contentType": "application/json",
        "headers": {
            "type": "object",
            "description": "AMQP properties.",
            "properties": {
                "message_id": {"type": "string"},
                "correlation_id": {"type": "string"},
                "reply_to": {"type": "string"},
            },
        },
        "payload": {"$ref": f"#/components/schemas/{message.__name__}"},
    }
    summary = next((line for line in (message.__doc__ or "").strip().splitlines() if line), "")
    if summary:
        described["summary"] = summary
    return described


def render(contents: Document) -> str:
    """Render the AsyncAPI document as text."""
    return json.dumps(contents, indent=2, sort_keys=True) + "\n"


def main() -> int:
    sys.stdout.write(render(document()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
