"""Settings of a gateway."""

from typing import Annotated

import msgspec
from msgspec import Meta

from services.gateway.batches.settings import BatchSettings
from services.gateway.webhooks.settings import WebhookSettings
from shared.contracts.base import NonEmpty
from shared.contracts.checks import IngressLimits
from shared.contracts.qos import Slo
from shared.runtime.settings import ServiceSettings
from shared.store.settings import StoreSettings

PositiveS = Annotated[float, Meta(gt=0)]


def _objectives() -> dict[str, Slo]:
    return {
        "interactive": Slo(ttft_s=2.0, tbt_s=0.2),
        "non_interactive": Slo(ttlt_s=300.0),
        "best_effort": Slo(),
    }


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `headway-gateway`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """HTTP port of the API, which also serves /health, /ready and /metrics."""
    ready_models: tuple[str, ...] = ()
    """
    Base models for which /ready waits after the start: it is 503 until an instance can serve each
    of them, and names those that are missing. Later losses of instances do not change it, since
    requests wait in the queue. Empty: /ready waits for no model.
    """
    api_keys: dict[str, str] = msgspec.field(default_factory=dict)
    """
    API key -> tenant. Without keys here, `keys_file` and `identity_header` there is no
    authentication, and all requests belong to `default_tenant`.
    """
    console: bool = True
    """True: /console shows the mesh to keys with the scope `operator`."""
    console_token: Annotated[str, Meta(min_length=16)] | None = None
    """
    Secret of the link `/console?token=…`, which opens the console without a key, once after each
    start of the gateway. Without a token, only keys open the console.
    """
    keys_file: NonEmpty | None = None
    """
    File of API keys that `headway keys` writes, or `store:`; changes take effect within a second.
    """
    identity_header: str | None = None
    """
    Header in which a proxy that has authenticated its users names the tenant, for example
    `x-forwarded-user`; read only from `trusted_proxies`.
    """
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies, for example `10.0.0.0/8`."""
    default_tenant: Annotated[str, Meta(min_length=1, max_length=128)] = "default"
    trust_fairness_header: bool = False
    """
    True: take the tenant from `x-llm-d-inference-fairness-id`, a header that only a proxy may set.
    """
    max_outstanding_per_tenant: Annotated[int, Meta(ge=1)] = 1024
    """
    Maximum number of open requests of one tenant at this gateway; further requests are refused with
    status 429.
    """
    max_open_body_bytes: Annotated[int, Meta(ge=1)] = 512 * 1024 * 1024
    """
    Bytes that the bodies of open requests may take at this gateway; at least four times
    `limits.max_body_bytes`. A tenant may take as many as are left, alone half of them; further
    requests are refused with status 503.
    """
    default_stream_slo: Slo = Slo(ttft_s=2.0, tbt_s=0.2)
    """SLO of streamed requests that set no SLO."""
    default_slo: Slo = Slo(ttlt_s=60.0)
    """SLO of requests that are not streamed and set no SLO."""
    objectives: dict[str, Slo] = msgspec.field(default_factory=_objectives)
    """SLOs by name, for `x-llm-d-inference-objective`; `async` and `batch` are read as
    `non_interactive` and `best_effort`."""
    limits: IngressLimits = IngressLimits()
    store: StoreSettings = StoreSettings()
    """Store of files; without `store.data_dir` and `store.url` there is none."""
    batches: BatchSettings = BatchSettings()
    """Limits and pace of batches."""
    webhooks: WebhookSettings = WebhookSettings()
    """Receivers of events about stored objects; they need a store."""
    publish_timeout_s: PositiveS = 5.0
    """Time limit for publishing a request to the broker; after it, the gateway answers with 503."""
    body_timeout_s: PositiveS = 30.0
    """Time limit for a client to send its body."""
    request_timeout_s: PositiveS = 900.0
    """
    Time limit of an HTTP request; the header `X-Request-Timeout-Seconds` can shorten the limit.
    """
    stream_keep_alive_s: Annotated[float, Meta(ge=0)] = 10.0
    """
    Longest time without a byte of an event stream: after it, also before the first token, a comment
    keeps proxies and clients from closing the connection. 0: no comments.
    """
    cors_origins: tuple[str, ...] = ()
    """
    Origins of web pages that may use the API, for example `https://chat.example.com`; `*`: all.
    """
    reply_silence_s: PositiveS = 10.0
    """
    Time without replies from a request's current run after which a failure reported by another run
    ends the request.
    """

    @property
    def health_address(self) -> tuple[str, int]:
        """
        Address of /health and /ready: the address of the API, unless a separate address is set.
        """
        return super().health_address if self.health_port else (self.host, self.port)
