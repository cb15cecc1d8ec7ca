"""What an operator can set about a gateway."""

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.contracts.checks import IngressLimits
from shared.contracts.qos import Slo
from shared.runtime.settings import ServiceSettings

PositiveS = Annotated[float, Meta(gt=0)]


def _tiers() -> dict[str, Slo]:
    return {
        "interactive": Slo(ttft_s=2.0, tbt_s=0.2),
        "async": Slo(ttlt_s=300.0),
        "batch": Slo(),
    }


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `headway-gateway`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """HTTP port of the API; /health, /ready and /metrics are there too."""
    api_keys: dict[str, str] = msgspec.field(default_factory=dict)
    """API key -> tenant. Empty: open to everybody, as `default_tenant`."""
    default_tenant: Annotated[str, Meta(min_length=1, max_length=128)] = "default"
    trust_fairness_header: bool = False
    """Take the tenant from `x-llm-d-inference-fairness-id`: only behind a proxy that sets it."""
    max_outstanding_per_tenant: Annotated[int, Meta(ge=1)] = 1024
    """Requests that one tenant may have open at this gateway; more get 429."""
    default_stream_slo: Slo = Slo(ttft_s=2.0, tbt_s=0.2)
    """For streamed requests that ask for nothing."""
    default_slo: Slo = Slo(ttlt_s=60.0)
    """For other requests that ask for nothing."""
    tiers: dict[str, Slo] = msgspec.field(default_factory=_tiers)
    """What the names in `x-llm-d-inference-objective` mean."""
    limits: IngressLimits = IngressLimits()
    publish_timeout_s: PositiveS = 5.0
    """How long to try to reach the broker before answering 503."""
    body_timeout_s: PositiveS = 30.0
    """Longest wait for a client to send its body."""
    request_timeout_s: PositiveS = 900.0
    """Longest life of an HTTP request; `X-Request-Timeout-Seconds` can shorten it."""
    reply_silence_s: PositiveS = 10.0
    """How long a live run must be silent before another failure of its request is believed."""

    @property
    def health_address(self) -> tuple[str, int]:
        """The API's own address, unless a separate one is set."""
        return super().health_address if self.health_port else (self.host, self.port)
