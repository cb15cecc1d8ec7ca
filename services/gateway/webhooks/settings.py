"""Settings of webhooks."""

from collections.abc import Collection
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from services.gateway.webhooks.signature import key_of
from shared.contracts.base import TenantId
from shared.contracts.errors import SettingsError
from shared.store.objects.webhooks import Notice

WebhookEvent = Literal[
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
]
PositiveS = Annotated[float, Meta(gt=0)]


class Webhook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A URL that gets events."""

    url: str
    secret: str
    """Secret of the signatures: `whsec_` and 24 to 64 bytes in base64."""
    events: tuple[WebhookEvent, ...] | None = None
    """Types of events; None: all."""

    def takes(self, kind: str) -> bool:
        """True if the URL gets events of this type."""
        return self.events is None or kind in self.events


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Receivers of events about stored objects, and limits of deliveries."""

    endpoints: dict[str, tuple[Webhook, ...]] = {}
    """Tenant -> URLs that get its events. Gateways of a mesh need the same ones."""
    allow_private: bool = False
    """
    True: deliver also to private, loopback and link-local addresses, and by plain http to any.
    """
    timeout_s: PositiveS = 10.0
    """Time limit of one attempt."""
    max_concurrent: Annotated[int, Meta(ge=1)] = 16
    """Maximum number of attempts at once."""
    give_up_after_s: PositiveS = 3 * 86400.0
    """Time after the event from which a failed delivery is not tried again."""
    kept_s: PositiveS = 30 * 86400.0
    """Time for which the record of a delivery is kept after its end."""

    def notice(self, tenant: TenantId, kind: str, object_id: str) -> Notice | None:
        """What is delivered about an event; None if no URL gets it."""
        urls = tuple(each.url for each in self.endpoints.get(tenant, ()) if each.takes(kind))
        if not urls:
            return None
        return Notice(tenant=tenant, type=kind, object_id=object_id, urls=urls)

    def find(self, tenant: str, url: str) -> Webhook | None:
        """The webhook of a delivery; None if the settings have it no more."""
        return next((each for each in self.endpoints.get(tenant, ()) if each.url == url), None)


def check_webhooks(settings: WebhookSettings) -> None:
    """
    Check URLs and secrets.

    Raises:
        SettingsError: One is invalid; the message names the tenant and the field.
    """
    for tenant, webhooks in settings.endpoints.items():
        for number, webhook in enumerate(webhooks):
            place = f"webhooks.endpoints.{tenant}[{number}]"
            schemes = ("https", "http") if settings.allow_private else ("https",)
            if not _is_receiver(webhook.url, schemes):
                raise SettingsError(
                    f"{place}.url must be a URL with {' or '.join(schemes)}, a host, and no user"
                )
            try:
                key_of(webhook.secret)
            except ValueError as error:
                raise SettingsError(f"{place}.secret {error}") from error


def _is_receiver(text: str, schemes: Collection[str]) -> bool:
    """True if *text* is a URL with one of *schemes*, a host and no user."""
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        return False
    return url.scheme in schemes and bool(url.hostname) and url.username is None and port != 0
