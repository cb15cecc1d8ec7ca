"""The broker itself: its release, its limits, and the user."""

from collections.abc import Iterator

from services.mesh.doctor.findings import Finding, deviation, note, ok
from shared.broker.amqp.inspection import HEARTBEAT_S, Server
from shared.contracts.errors import BrokerUnavailableError, MeshError

OLDEST = (3, 10)
TESTED = ((3, 10), (4, 0))
FIRST_WITH_SMALL_MESSAGES = (4, 0)
LEAST_CHANNELS = 512
"""An agent uses up to four channels for each queue that it pulls from."""
TRUSTED = ("guest", "headway-gateway")
"""Default of the grouper's setting `trusted_users`."""


def on_refusal(error: MeshError) -> Finding:
    """The connection could not be made."""
    text = str(error)
    if isinstance(error, BrokerUnavailableError):
        return deviation(
            "connection",
            text,
            so="no service can connect",
            do="start the broker, or correct host, port and TLS of the URL",
        )
    if "vhost" in text:
        return deviation(
            "connection",
            text,
            so="no service can connect",
            do="create the virtual host and permit the user: `rabbitmqctl add_vhost VHOST`, "
            "`rabbitmqctl set_permissions -p VHOST USER '.*' '.*' '.*'`",
        )
    return deviation(
        "connection", text, so="no service can connect", do="correct user and password of the URL"
    )


def on_trouble(error: MeshError) -> Finding:
    """A step failed in a way that the doctor does not know."""
    return deviation(
        "doctor",
        str(error),
        so="later checks were not made",
        do="look at the broker's log for the connection headway-doctor",
    )


def on_server(server: Server) -> Iterator[Finding]:
    """What follows from the release and its limits."""
    name = f"{server.product} {server.version}"
    if server.product != "RabbitMQ" or server.release < OLDEST:
        yield deviation(
            "version",
            name,
            so="Headway uses quorum queues with delivery limits, as RabbitMQ has them since 3.10",
            do="use RabbitMQ 3.10 or later",
        )
    elif server.release in TESTED:
        yield ok("version", name)
    else:
        tested = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
        yield note("version", f"{name}; tested are {tested}")
    if server.release >= FIRST_WITH_SMALL_MESSAGES:
        yield note(
            "sizes",
            "RabbitMQ 4 refuses messages above 16 MiB, unless max_message_size is set",
            so="larger requests and answers fail with an error that says so",
            do="for large images or prompts, set max_message_size in rabbitmq.conf",
        )
        yield note(
            "delivery limit",
            "RabbitMQ 4 drops a message after 20 deliveries from a quorum queue without a limit",
            so="nothing: all queues of Headway have a limit of their own",
        )
    if 0 < server.channel_max < LEAST_CHANNELS:
        yield deviation(
            "channels",
            f"one connection may have {server.channel_max} channels",
            so="an agent that pulls from many lanes cannot open the channels that it needs",
            do=f"set channel_max to at least {LEAST_CHANNELS}, or to 0",
        )
    yield ok(
        "heartbeat",
        f"{HEARTBEAT_S} s, as services request it: a dead service is noticed after about three",
    )
    yield note(
        "consumer timeout",
        "cannot be seen over AMQP; RabbitMQ's default is 30 minutes",
        so="agents renew requests that they hold for longer than a quarter of this time",
        do="if the broker's consumer_timeout is shorter, set the agents' consumer_timeout_s to it",
    )


def on_user(user: str) -> Iterator[Finding]:
    """What follows from the name of the user."""
    if user not in TRUSTED:
        yield note(
            "user",
            f"{user!r} is not among the default trusted_users of the grouper",
            so="tenants and arrival times of gateways that connect as this user are ignored",
            do=f"add {user!r} to grouper.trusted_users if gateways connect with this URL",
        )
