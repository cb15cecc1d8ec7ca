"""The committed cases of assembly match the code, and show each rule once."""

import json
from pathlib import Path
from typing import Any

import msgspec

from ops.generate import assembly
from ops.generate.asyncapi import REPLIES, document
from shared.contracts.base import tag_of
from shared.contracts.requests import Reply, ReplyMode

COMMITTED = Path(__file__).parents[3] / "ops" / "docs" / "assembly.json"
CASES: list[dict[str, Any]] = json.loads(COMMITTED.read_text())["cases"]


def test_committed_cases_are_current():
    """To update the cases: python -m ops.generate.assembly > ops/docs/assembly.json"""
    assert assembly.render() == COMMITTED.read_text()


def test_the_python_client_passes_every_case():
    failed = []
    for case in CASES:
        steps = [
            assembly.Step(
                step["at"],
                step["do"],
                msgspec.convert(step["reply"], Reply) if "reply" in step else None,
            )
            for step in case["steps"]
        ]
        played = assembly.play(ReplyMode(case["reply"]), steps)
        found = [[assembly.plain(effect) for effect in effects] for effects in played]
        if found != [step["effects"] for step in case["steps"]]:
            failed.append(case["case"])

    assert failed == []


def test_cases_have_names_of_their_own_and_all_replies_and_effects():
    steps = [step for case in CASES for step in case["steps"]]
    kinds = {step["reply"]["kind"] for step in steps if "reply" in step}
    effects = {effect["effect"] for step in steps for effect in step["effects"]}
    described = document()["components"]["messages"]

    assert len({case["case"] for case in CASES}) == len(CASES)
    assert kinds == {tag_of(reply) for reply in REPLIES}
    assert kinds <= {message["name"] for message in described.values()}
    assert effects == set(assembly.NAMES.values())
