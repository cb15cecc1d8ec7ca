"""Choice of broker and engine on this machine, each explained in one line."""

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
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from services.mesh.spec import EMBEDDED
from shared.contracts.errors import BrokerUnavailableError, SettingsError
from shared.runtime.settings import DEFAULT_AMQP_URL

AMQP_PORT = 5672


@contextlib.contextmanager
def broker_for(requested: str | None) -> Iterator[tuple[str, str]]:
    """
    Yield a broker for the duration of the block, and a line that describes it.

    Args:
        requested: AMQP URL, `embedded`, `private`, or None for the best available broker. The best
            is the broker at HEADWAY_AMQP_URL or on localhost if it answers, else a private node if
            rabbitmq-server is installed, else the embedded broker.

    Raises:
        SettingsError: The requested broker is not available.
    """
    if requested == EMBEDDED:
        yield EMBEDDED, "broker: embedded (requested)"
        return
    if requested not in (None, "private"):
        assert requested is not None
        if not _answers(requested):
            raise SettingsError(f"no broker answers at {_shown(requested)}")
        yield requested, f"broker: {_shown(requested)} (requested)"
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
    Return an engine backend and a line that explains the choice.

    Raises:
        SettingsError: vLLM was requested and cannot run; the message says why.
    """
    if requested == "simulated":
        return "simulated", "engine: simulated (requested)"
    if requested not in (None, "vllm"):
        raise SettingsError(f"unknown engine {requested!r}: must be vllm or simulated")
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
    """
    Yield a new virtual host on a local broker, so that existing virtual hosts stay unchanged.
    """
    parts = urlsplit(url)
    ctl = shutil.which("rabbitmqctl")
    if ctl is None or parts.hostname not in ("127.0.0.1", "localhost"):
        yield url
        return
    name = f"headway-{secrets.token_hex(4)}"
    user = unquote(parts.username or "guest")
    try:
        run_ctl([ctl, "-q", "add_vhost", name])
    except BrokerUnavailableError:
        yield url  # the user may not administer the broker
        return
    try:
        run_ctl([ctl, "-q", "set_permissions", "-p", name, user, ".*", ".*", ".*"])
        scratch = parts._replace(path=f"/{name}").geturl()
    except BrokerUnavailableError:  # the broker at the URL is another one
        scratch = url
    try:
        yield scratch
    finally:
        with contextlib.suppress(BrokerUnavailableError):
            run_ctl([ctl, "-q", "delete_vhost", name])


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    return answers(parts.hostname or "127.0.0.1", parts.port or AMQP_PORT)


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or AMQP_PORT}{parts.path}"
