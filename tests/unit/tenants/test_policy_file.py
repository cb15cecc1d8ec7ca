"""The file of policies: strict, with errors that name tenant and field, and followed."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.base import TenantId
from shared.contracts.errors import SettingsError
from shared.contracts.qos import QosClass
from shared.contracts.tenants.policies import LimitKind, TenantPolicy
from shared.tenants.policies import Policies, WatchedPolicies, decode_policies, open_policies
from shared.tenants.watched import WatchedFile


def decoded(content: Any) -> Policies:
    return decode_policies(Path("tenants.json"), json.dumps(content).encode())


def test_a_tenant_has_its_policy_and_others_have_the_default() -> None:
    """Tenants that are not listed have the policy `default`."""
    policies = decoded(
        {
            "default": {"requests_per_minute": 60},
            "tenants": {"acme": {"classes": ["best_effort"], "tokens_per_minute": 1000}},
        }
    )

    assert policies.policy(TenantId("acme")).classes == (QosClass.BEST_EFFORT,)
    assert policies.policy(TenantId("acme")).limits == {LimitKind.TOKENS: 1000}
    assert policies.policy(TenantId("other")).requests_per_minute == 60


async def test_without_a_file_everything_is_allowed() -> None:
    """No file, no limits."""
    assert TenantPolicy() == (await open_policies(None)).policy(TenantId("acme"))


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ({"request_per_minute": 5}, "unknown field `request_per_minute`"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"classes": []}, "classes"),
        ({"classes": ["fast"]}, "fast"),
        ({"min_ttft_s": -1}, "min_ttft_s"),
        ({"min_priority": 5, "max_priority": 1}, "min_priority is 5"),
        ({"weight": 0}, "weight"),
    ],
)
def test_an_error_names_tenant_and_field(policy: Any, names: str) -> None:
    """A mistake in one policy is found by its tenant's name."""
    with pytest.raises(SettingsError, match="tenant 'acme'") as refused:
        decoded({"tenants": {"acme": policy}})

    assert names in str(refused.value)


@pytest.mark.parametrize("content", [b"{", b'{"tenant": {}}', b"[]"])
def test_a_file_that_is_not_one_is_refused(content: bytes) -> None:
    """Invalid JSON and unknown fields are errors."""
    with pytest.raises(SettingsError, match=r"tenants\.json"):
        decode_policies(Path("tenants.json"), content)


async def test_a_new_version_takes_effect_and_a_broken_one_does_not(tmp_path: Path) -> None:
    """The last valid version stays in effect, and the error of a newer one is reported."""
    path = tmp_path / "tenants.json"
    path.write_text('{"tenants": {"acme": {"requests_per_minute": 1}}}')
    policies = WatchedPolicies(WatchedFile(path, decode_policies))
    first = policies.state.digest
    path.write_text('{"tenants": {"acme": {"requests_per_minute": "many"}}}')
    await policies._source.apply()

    assert policies.policy(TenantId("acme")).requests_per_minute == 1
    assert first == policies.state.digest
    assert "requests_per_minute" in policies.state.refused

    path.write_text('{"tenants": {"acme": {"requests_per_minute": 2}}}')
    await policies._source.apply()

    assert policies.policy(TenantId("acme")).requests_per_minute == 2
    assert first != policies.state.digest
    assert policies.state.refused == ""


async def test_a_mistake_that_is_undone_is_no_longer_reported(tmp_path: Path) -> None:
    """If the file has its former content again, nothing is refused any more."""
    path = tmp_path / "tenants.json"
    path.write_text("{}")
    policies = WatchedPolicies(WatchedFile(path, decode_policies))
    path.write_text("{")
    await policies._source.apply()
    assert policies.state.refused

    path.write_text("{}")
    await policies._source.apply()

    assert policies.state.refused == ""
