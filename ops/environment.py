"""What this machine offers: which broker, which engine, said in one line each."""

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ops.broker import PrivateNode, answers, rabbitmq_binary, run_ctl
from ops.setup import VLLM_REASON
from services.agent.backends.vllm.availability import vllm_unavailable_reason
from services.mesh.spec import EMBEDDED
from shared.contracts.errors import BrokerUnavailableError, SettingsError
from shared.runtime.settings import DEFAULT_AMQP_URL

AMQP_PORT = 5672


@contextlib.contextmanager
def broker_for(requested: str | None) -> Iterator[tuple[str, str]]:
    """
    A broker for the length of the block, and a line that says which.

    Args:
        requested: AMQP URL, `embedded`, `private`, or None for the best there is: the one at
            HEADWAY_AMQP_URL or on localhost if it answers, else a private node of an
            installed rabbitmq-server, else the embedded broker.

    Raises:
        SettingsError: What was asked for is not there.
    """
    if requested == EMBEDDED:
        yield EMBEDDED, "broker: embedded (asked for)"
        return
    if requested not in (None, "private"):
        assert requested is not None
        if not _answers(requested):
            raise SettingsError(f"no broker answers at {_shown(requested)}")
        yield requested, f"broker: {_shown(requested)} (asked for)"
        return
    url = os.environ.get("HEADWAY_AMQP_URL") or DEFAULT_AMQP_URL
    if requested is None and _answers(url):
        with _scratch_vhost(url) as scratch:
            yield scratch, f"broker: {_shown(scratch)} (it answers)"
    elif rabbitmq_binary("rabbitmq-server") is not None:
        with tempfile.TemporaryDirectory(prefix="headway-broker-") as directory:
            node = PrivateNode(Path(directory))
            try:
                node.start()
                yield node.url, f"broker: a private RabbitMQ node on port {node.port}"
            finally:
                node.close()
    elif requested == "private":
        raise SettingsError("rabbitmq-server is not installed; `sudo make broker` installs it")
    else:
        yield (
            EMBEDDED,
            (
                "broker: embedded, since no RabbitMQ answers and none is installed "
                "(`sudo make broker` installs it)"
            ),
        )


def engine_for(requested: str | None) -> tuple[str, str]:
    """
    An engine backend and a line that says why that one.

    Raises:
        SettingsError: vLLM was asked for and cannot run; says why.
    """
    if requested == "simulated":
        return "simulated", "engine: simulated (asked for)"
    if requested not in (None, "vllm"):
        raise SettingsError(f"engine {requested!r} is neither vllm nor simulated")
    reason = vllm_unavailable_reason()
    if reason is None:
        return "vllm", "engine: vLLM"
    if VLLM_REASON.exists():
        reason = VLLM_REASON.read_text().strip()
    if requested == "vllm":
        raise SettingsError(f"vLLM cannot run here: {reason}")
    return "simulated", f"engine: simulated, since vLLM cannot run here: {reason}"


@contextlib.contextmanager
def _scratch_vhost(url: str) -> Iterator[str]:
    """A virtual host of our own on a local broker, so that nothing is left behind in another's."""
    parts = urlsplit(url)
    ctl = shutil.which("rabbitmqctl")
    if ctl is None or parts.hostname not in ("127.0.0.1", "localhost"):
        yield url
        return
    name = f"headway-{secrets.token_hex(4)}"
    user = unquote(parts.username or "guest")
    try:
        run_ctl([ctl, "-q", "add_vhost", name])
        run_ctl([ctl, "-q", "set_permissions", "-p", name, user, ".*", ".*", ".*"])
    except BrokerUnavailableError:
        yield url  # not ours to administer
        return
    try:
        yield parts._replace(path=f"/{name}").geturl()
    finally:
        with contextlib.suppress(BrokerUnavailableError):
            run_ctl([ctl, "-q", "delete_vhost", name])


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    return answers(parts.hostname or "127.0.0.1", parts.port or AMQP_PORT)


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or AMQP_PORT}{parts.path}"
