"""The command line of the gateway."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.cli import main
from services.gateway.tail import line, print_until
from shared.broker.amqp.connection import broker_user
from shared.contracts.base import InstanceId, ModelName, RequestId, TenantId
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import RequestObserved
from shared.runtime.lifecycle import EXIT_OK, EXIT_USAGE

OBSERVED = RequestObserved(
    request_id=RequestId("r1"),
    instance_id=InstanceId("i1"),
    model=ModelName("m"),
    engine="simulated",
    device="cpu",
    application="default",
    tenant=TenantId("acme"),
    qos_class=QosClass.INTERACTIVE,
    prompt_tokens=10,
    output_tokens=5,
    arrived_at=1000.0,
    pulled_at=1000.1,
    submitted_at=1000.25,
    first_token_at=1000.5,
    finished_at=1001.0,
    attained=True,
)


async def test_tail_prints_json_lines_up_to_its_limit(capsys: pytest.CaptureFixture[str]):
    observed: asyncio.Queue[RequestObserved] = asyncio.Queue()
    for _ in range(3):
        observed.put_nowait(OBSERVED)

    await print_until(asyncio.Event(), observed, limit=2, as_json=True)

    lines = capsys.readouterr().out.splitlines()
    assert [msgspec.json.decode(text, type=RequestObserved) for text in lines] == [OBSERVED] * 2


async def test_tail_ends_at_the_stop_signal(capsys: pytest.CaptureFixture[str]):
    stop = asyncio.Event()
    stop.set()

    await print_until(stop, asyncio.Queue())

    assert capsys.readouterr().out == ""


def test_line_contains_the_main_figures():
    assert line(OBSERVED) == (
        "00:16:41 met  interactive     m on i1 for acme: 10 in, 5 out, "
        "queued 0.250 s, first token 0.500 s, whole 1.000 s"
    )


@pytest.mark.parametrize(
    ("reached", "times"),
    [
        ({}, "queued 0.250 s, first token 0.500 s, deadline_expired after 1.000 s"),
        ({"first_token_at": 0.0}, "queued 0.250 s, deadline_expired after 1.000 s"),
        ({"submitted_at": 0.0, "first_token_at": 0.0}, "deadline_expired after 1.000 s"),
    ],
)
def test_line_of_a_failed_request_has_its_error_and_the_stages_that_it_reached(
    reached: dict[str, float], times: str
):
    failed = replace(OBSERVED, attained=False, outcome="deadline_expired", **reached)

    begin = "00:16:41 FAIL interactive     m on i1 for acme: 10 in, 5 out, "
    assert line(failed) == begin + times


def test_check_config_masks_api_keys(capsys: pytest.CaptureFixture[str]):
    code = main(["check-config", "--json", "--set", 'api_keys={"secret":"acme"}'])

    shown = msgspec.json.decode(capsys.readouterr().out)
    assert code == 0
    assert shown["api_keys"] == "***"
    assert shown["port"] == 8000


@pytest.mark.parametrize(
    "setting", ["port=0", "port=eighty", "publish_timeout_s=0", "objectives={}x", "nonsense=1"]
)
def test_bad_settings_are_a_usage_error(setting: str):
    assert main(["check-config", "--set", setting]) == 2


@pytest.mark.parametrize(
    ("url", "user"),
    [
        ("amqp://us%40er:pw@host/", "us@er"),
        ("amqp://host:5672/", "guest"),
        ("memory://", "guest"),
    ],
)
def test_broker_user_comes_from_the_url(url: str, user: str):
    assert broker_user(url) == user


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tenants": "{directory}/bad.json"}, "tenant 'acme': Object contains unknown field `rpm`"),
        ({"tenants": "{directory}/none.json"}, "none.json"),
        ({"keys_file": "{directory}/keys.json"}, "two keys have the id 'k'"),
        ({"identity_header": "x-forwarded-user"}, "identity_header needs trusted_proxies"),
        ({"trusted_proxies": '["proxy"]'}, "trusted_proxies"),
        ({"max_open_body_bytes": "16777215"}, "at least 4 times limits.max_body_bytes"),
    ],
)
def test_check_config_names_mistakes_about_tenants_and_bodies(
    settings: dict[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bad.json").write_text('{"tenants": {"acme": {"rpm": 5}}}')
    key = {"id": "k", "tenant": "t"}
    keys = [key | {"sha256": digit * 64} for digit in "01"]
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode({"keys": keys}))
    (tmp_path / "keys.json").chmod(0o600)
    values = [f"{name}={value.format(directory=tmp_path)}" for name, value in settings.items()]

    assert main(["check-config", *(f"--set={value}" for value in values)]) == EXIT_USAGE
    assert says in capsys.readouterr().err


def test_check_config_shows_no_key(capsys: pytest.CaptureFixture[str]):
    assert main(["check-config", "--json", '--set=api_keys={"sk-secret": "acme"}']) == EXIT_OK
    assert "sk-secret" not in capsys.readouterr().out
