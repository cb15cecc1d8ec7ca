"""Signatures of webhooks, checked by OpenAI's client."""

import time

import msgspec
import openai
import pytest

from services.gateway.webhooks.settings import Webhook, WebhookSettings, check_webhooks
from services.gateway.webhooks.signature import signed_headers
from shared.contracts.base import TenantId
from shared.contracts.errors import SettingsError
from shared.runtime.settings import masked

SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
OTHER = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWY="
PAYLOAD = msgspec.json.encode(
    {
        "id": "evt_1",
        "object": "event",
        "created_at": 1_700_000_000,
        "type": "response.completed",
        "data": {"id": "resp_1"},
    }
)
ACME = TenantId("acme")


def client(secret: str) -> openai.OpenAI:
    return openai.OpenAI(api_key="x", webhook_secret=secret)


def test_openais_client_unwraps_a_signed_event():
    headers = signed_headers(PAYLOAD, event_id="evt_1", secret=SECRET, now=time.time())

    event = client(SECRET).webhooks.unwrap(PAYLOAD, headers)

    assert event.type == "response.completed"
    assert event.data.id == "resp_1"


@pytest.mark.parametrize(
    ("payload", "secret", "age_s"),
    [(PAYLOAD + b" ", SECRET, 0), (PAYLOAD, OTHER, 0), (PAYLOAD, SECRET, 3600)],
    ids=["another payload", "another secret", "an old one"],
)
def test_openais_client_refuses_what_is_not_signed_so(payload: bytes, secret: str, age_s: float):
    headers = signed_headers(PAYLOAD, event_id="evt_1", secret=SECRET, now=time.time() - age_s)

    with pytest.raises(openai.InvalidWebhookSignatureError):
        client(secret).webhooks.unwrap(payload, headers)


def test_the_example_of_the_specification_has_its_signature():
    headers = signed_headers(
        b'{"test": 2432232314}',
        event_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        now=1614265330.9,
    )

    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def settings_of(**fields: object) -> WebhookSettings:
    webhook = {"url": "https://example.com/hook", "secret": SECRET}
    tenants = {"acme": [webhook | fields]}
    return msgspec.convert({"endpoints": tenants}, WebhookSettings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "http://example.com"}, r"endpoints\.acme\[0\]\.url must be a URL with https"),
        ({"url": "https://user:x@example.com"}, "no user"),
        ({"url": "https:///path"}, "a host"),
        ({"url": "https://[::1/"}, r"endpoints\.acme\[0\]\.url must be a URL"),
        ({"url": "https://[::ffff:①②⑦.0.0.1]/"}, r"acme\[0\]\.url must be a URL"),
        ({"url": "https://example.com:99999/"}, r"acme\[0\]\.url must be a URL"),
        ({"secret": "geheim"}, r"endpoints\.acme\[0\]\.secret must be whsec_ and 24 to 64 bytes"),
        ({"secret": "whsec_c2hvcnQ="}, "24 to 64 bytes"),
        ({"secret": "whsec_?"}, "in base64"),
    ],
)
def test_invalid_webhooks_are_refused_by_name(fields: dict[str, object], message: str):
    with pytest.raises(SettingsError, match=message):
        check_webhooks(settings_of(**fields))


def test_plain_http_is_for_private_networks():
    plain = msgspec.structs.replace(settings_of(url="http://10.0.0.1/hook"), allow_private=True)

    check_webhooks(plain)
    check_webhooks(settings_of())


def test_a_url_gets_the_events_that_it_names():
    settings = settings_of(events=["response.failed", "batch.completed"])

    assert settings.notice(ACME, "response.completed", "resp_1") is None
    assert settings.notice(TenantId("other"), "response.failed", "resp_1") is None
    notice = settings.notice(ACME, "response.failed", "resp_1")
    assert notice is not None
    assert notice.urls == ("https://example.com/hook",)


def test_secrets_are_masked():
    shown = masked(settings_of())

    assert shown["endpoints"]["acme"][0]["secret"] == "***"
    assert shown["endpoints"]["acme"][0]["url"] == "https://example.com/hook"
    assert isinstance(settings_of().endpoints["acme"][0], Webhook)
