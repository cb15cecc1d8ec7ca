"""
RabbitMQ definitions from the topology table: `python -m ops.generate.definitions`.

One user per service, with minimal permissions. No user may write to the default exchange,
because it routes to every queue by name.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shared.broker import topology
from shared.broker.arguments import exchange_arguments, queue_arguments

_NOTHING = "^$"
_ALL = ".*"
_WORK = r"(?:lock\.)?(?:lane|overflow|resume|relegated|inbox)\..*"
_COMPANIONS = r"(?:lock\.)?(?:resume|relegated|inbox)\..*"
_REPLY = r"reply\..*"

_OMITTED = (topology.WORK_QUEUES,)
"""
Queues that planners create: without this queue, they know that the broker has no work queues.
"""

Definitions = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """
    Permissions of one user, as regular expressions over queue and exchange names.

    Binding needs write on the queue and read on the exchange; declaring a dead-lettering
    queue needs write on its dead-letter exchange.
    """

    user: str
    configure: str
    write: str
    read: str
    topic_writes: tuple[tuple[str, str], ...] = ()
    """(Topic exchange, regular expression of routing keys with which the user may publish)."""
    tags: tuple[str, ...] = ()


def _one_of(*patterns: str, names: Iterable[str] = ()) -> str:
    return f"^(?:{'|'.join((*(re.escape(name) for name in names), *patterns))})$"


_OF_PRODUCER = r"^(?:all\.cancel|instance\..*|request\.asked)$"
_OF_GATEWAY = (
    r"^(?:all\.(?:cancel|gateways)|instance\..*|command\.cancel|(?:usage|request|stories)\.asked)$"
)
_GATEWAY_PRIVATE = r"(?:gateway|tail|show|answer)[.-].*"
_PLANNER_PRIVATE = r"(?:grouper|leader|planner|show)[.-].*"
_ESTIMATOR_PRIVATE = r"(?:estimator|show)[.-].*"
_AGENT_PRIVATE = r"(?:agent|plan|show)[.-].*"

GRANTS: tuple[Grant, ...] = (
    Grant(
        user="headway-gateway",
        configure=_one_of(_REPLY, _GATEWAY_PRIVATE),
        write=_one_of(_REPLY, _GATEWAY_PRIVATE, names=(topology.REQUESTS, topology.CONTROL)),
        read=_one_of(
            _REPLY,
            _GATEWAY_PRIVATE,
            names=(topology.REPLIES, topology.CONTROL, topology.TELEMETRY, topology.PROFILES),
        ),
        topic_writes=((topology.CONTROL, _OF_GATEWAY),),
    ),
    # Owns the topology: the only service that may create and delete lanes.
    Grant(
        user="headway-planner",
        configure=_one_of(r"headway\..*", _WORK, _PLANNER_PRIVATE),
        write=_one_of(r"headway\..*", _WORK, _PLANNER_PRIVATE),
        read=_one_of(r"headway\..*", _WORK, _PLANNER_PRIVATE),
    ),
    Grant(
        user="headway-estimator",
        configure=_one_of(_ESTIMATOR_PRIVATE),
        write=_one_of(
            _ESTIMATOR_PRIVATE,
            names=(topology.TELEMETRY, topology.PROFILES, topology.CONTROL, topology.REPLIES),
        ),
        read=_one_of(
            _ESTIMATOR_PRIVATE,
            names=(
                topology.ESTIMATOR,
                topology.USAGE,
                topology.CONTROL,
                topology.TELEMETRY,
                topology.PROFILES,
            ),
        ),
    ),
    Grant(
        user="headway-agent",
        configure=_one_of(_COMPANIONS, _AGENT_PRIVATE),
        write=_one_of(
            _COMPANIONS,
            _AGENT_PRIVATE,
            names=(
                topology.LANES,
                topology.REPLIES,
                topology.CONTROL,
                topology.TELEMETRY,
                topology.DEAD,
                topology.UNCLAIMED,
            ),
        ),
        read=_one_of(
            _WORK,
            _AGENT_PRIVATE,
            names=(
                topology.LANES,
                topology.PLANS,
                topology.CONTROL,
                topology.CANCELS,
                topology.PROFILES,
            ),
        ),
    ),
    # Example of an AMQP client that publishes requests; copy it per tenant.
    Grant(
        user="producer",
        configure=_one_of(_REPLY),
        write=_one_of(_REPLY, names=(topology.REQUESTS, topology.CONTROL)),
        read=_one_of(_REPLY, names=(topology.REPLIES,)),
        topic_writes=((topology.CONTROL, _OF_PRODUCER),),
    ),
    Grant(user="operator", configure=_ALL, write=_ALL, read=_ALL, tags=("administrator",)),
)

REPLY_POLICY = "headway-replies"
UNCLAIMED_POLICY = "headway-unclaimed"


def definitions(*, vhost: str = "/", passwords: dict[str, str] | None = None) -> Definitions:
    """
    Return the document for `load_definitions` and `rabbitmqctl import_definitions`.

    Args:
        vhost: Virtual host of all objects.
        passwords: Password of each user; the default is the user's name, for development only.
    """
    secrets = passwords or {}
    return {
        "vhosts": [{"name": vhost}],
        "users": [
            {
                "name": grant.user,
                "password": secrets.get(grant.user, grant.user),
                "tags": list(grant.tags),
            }
            for grant in GRANTS
        ],
        "permissions": [
            {
                "user": grant.user,
                "vhost": vhost,
                "configure": grant.configure,
                "write": grant.write,
                "read": grant.read,
            }
            for grant in GRANTS
        ],
        "topic_permissions": [
            {
                "user": grant.user,
                "vhost": vhost,
                "exchange": exchange,
                "write": keys,
                "read": _NOTHING,
            }
            for grant in GRANTS
            for exchange, keys in grant.topic_writes
        ],
        "policies": [
            {
                # Producers declare their reply queues themselves; this policy also bounds those
                # queues.
                "vhost": vhost,
                "name": REPLY_POLICY,
                "pattern": r"^reply\.",
                "apply-to": "queues",
                "priority": 0,
                "definition": {
                    "max-length-bytes": topology.REPLY_MAX_BYTES,
                    "overflow": "drop-head",
                    "expires": int(topology.REPLY_EXPIRES_S * 1000),
                },
            },
            {
                "vhost": vhost,
                "name": UNCLAIMED_POLICY,
                "pattern": f"^{re.escape(topology.UNCLAIMED_FINALS)}$",
                "apply-to": "queues",
                "priority": 0,
                "definition": {"message-ttl": int(topology.UNCLAIMED_TTL_S * 1000)},
            },
        ],
        "exchanges": [
            {
                "name": spec.name,
                "vhost": vhost,
                "type": spec.type.value,
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": exchange_arguments(spec),
            }
            for spec in topology.EXCHANGES
        ],
        "queues": [
            {
                "name": spec.name,
                "vhost": vhost,
                "durable": spec.durable,
                "auto_delete": False,
                "arguments": queue_arguments(spec),
            }
            for spec in (*topology.QUEUES, *topology.DELAY_QUEUES)
            if spec.name not in _OMITTED
        ],
        "bindings": [
            {
                "source": spec.exchange,
                "vhost": vhost,
                "destination": spec.queue,
                "destination_type": "queue",
                "routing_key": spec.routing_key,
                "arguments": {},
            }
            for spec in (*topology.BINDINGS, *topology.DELAY_BINDINGS)
            if spec.queue not in _OMITTED
        ],
    }


def render(contents: Definitions) -> str:
    """Render the RabbitMQ definitions as text."""
    return json.dumps(contents, indent=2) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.generate.definitions")
    parser.add_argument("--vhost", default="/")
    parser.add_argument(
        "--password",
        action="append",
        default=[],
        metavar="USER=PASSWORD",
        help="password of a user, repeatable; the default password is the user's name",
    )
    arguments = parser.parse_args(argv)
    users = {grant.user for grant in GRANTS}
    passwords = dict(pair.partition("=")[::2] for pair in arguments.password)
    if unknown := passwords.keys() - users:
        parser.error(f"no such user: {', '.join(sorted(unknown))}; known users: {sorted(users)}")
    sys.stdout.write(render(definitions(vhost=arguments.vhost, passwords=passwords)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
