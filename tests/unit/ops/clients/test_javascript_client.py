"""Errors, limits and the end of the npm package, over a stand-in for amqplib."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ops.clients.npm import HERE
from tests.requirements import program

CASES = Path(__file__).parent
EXPECTED: dict[str, Any] = {
    "noUrl": "BrokerError invalid_url",
    "wrongLogin": "BrokerError broker_refused",
    "wrongVirtualHost": "BrokerError broker_refused",
    "brokerAway": "BrokerError broker_unavailable",
    "lateStatusLeavesNothing": [
        "BrokerError broker_unavailable",
        "BrokerError broker_unavailable",
        "running",
        0,
    ],
    "closeOnLostConnection": "done",
    "closeDuringOutage": ["HeadwayError client_closed", "HeadwayError client_closed"],
    "publishOnClosingConnection": ["done", 2],
    "repeatedWhileInProgress": [
        1,
        "HeadwayError id_conflict",
        "HeadwayError duplicate_request",
        [["seven", " eight"], ["seven eight"]],
        "seven eight",
    ],
    "repeatedBesideAFailedPublish": ["BrokerError over_capacity"] * 2 + ["done"],
    "numbersThatJsonLacks": [
        [
            "slo.ttft_s is NaN; it must be a finite number",
            "ttl_s is -1; it must be above 0 and at most 2592000 (seconds)",
            "slo.tbt_s is 0; it must be above 0 and at most 2592000 (seconds)",
            "temperature is Infinity; it must be a finite number",
            "body.logit_bias.7 is -Infinity; it must be a finite number",
            "ttl_s is NaN; it must be a finite number",
            "ttl_s is -1; it must be above 0 and at most 2592000 (seconds)",
            "ttl_s is an invalid date",
            "ttl_s is NaN; it must be a finite number",
            "ttl_s is a function, which JSON does not have",
            "max_tokens is a bigint, which JSON does not have",
            "body.list[1] is a bigint, which JSON does not have",
            "JSON cannot be made: Converting circular structure to JSON",
            "a request must be an object with fields",
            "request_id is a bigint, which JSON does not have",
            "timeoutS is NaN; it must be a number from 0 to 2147482 (seconds)",
            "giveUpAfterS is -1; it must be a number from 0 to 2147482 (seconds)",
        ],
        0,
    ],
    "unreadableReply": ["seven", 2, ["HeadwayWarning"]],
    "tooLargeBesideAnother": ["done", "BrokerError broker_refused"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program's folder, with the package and the stand-in."""
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(HERE, folder / "node_modules" / "headway-client")
    amqplib = folder / "node_modules" / "amqplib"
    amqplib.mkdir()
    (amqplib / "package.json").write_text('{"type": "module", "exports": "./index.mjs"}')
    shutil.copy(CASES / "fake_amqplib.mjs", amqplib / "index.mjs")
    shutil.copy(CASES / "client_cases.mjs", folder)
    return folder


@pytest.mark.parametrize("name", EXPECTED)
def test_the_outcome_of_a_case(name: str, folder: Path):
    command = [program("node", "npm"), "client_cases.mjs", name]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=20.0
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: EXPECTED[name]}
