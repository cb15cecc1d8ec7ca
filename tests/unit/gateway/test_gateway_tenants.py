"""Authentication, tenants, and limits of open requests."""

from pathlib import Path
from typing import Any

import pytest

from services.gateway.headers import Hints
from services.gateway.tenants import Tenants, networks_of
from shared.contracts.base import TenantId
from shared.contracts.errors import CapacityError, ContractError, SettingsError
from shared.contracts.tenants.keys import Scope
from shared.contracts.tenants.policies import TenantPolicy
from shared.tenants.keys import key_edit, key_file
from shared.tenants.policies import Policies
from tests.clocks import FakeClock
from tests.unit.gateway.rig import tenants_of


def tenants(*, keys: dict[str, str] | None = None, trust: bool = False, limit: int = 2) -> Tenants:
    return tenants_of(
        api_keys=keys or {},
        trust_fairness_header=trust,
        max_outstanding=limit,
    )


def test_without_keys_every_request_is_of_the_default_tenant():
    assert tenants().authenticate(None) == "default"


def test_key_determines_the_tenant():
    some = tenants(keys={"k1": "acme", "k2": "beta"})

    assert some.authenticate("Bearer k2") == "beta"
    assert some.authenticate("bearer  k1") == "acme"


@pytest.mark.parametrize("header", [None, "", "k1", "Basic k1", "Bearer", "Bearer nope"])
def test_other_credentials_are_rejected(header: str | None):
    with pytest.raises(ContractError) as caught:
        tenants(keys={"k1": "acme"}).authenticate(header)

    assert caught.value.status == 401


def test_fairness_id_is_ignored_unless_trusted():
    acme, hints = TenantId("acme"), Hints(fairness_id="beta")

    assert tenants().effective(acme, hints) == "acme"
    assert tenants(trust=True).effective(acme, hints) == "beta"
    assert tenants(trust=True).effective(acme, Hints()) == "acme"


def test_slots_are_counted_per_tenant_and_released():
    some, acme = tenants(limit=1), TenantId("acme")
    with some.slot(acme):
        with pytest.raises(CapacityError), some.slot(acme):
            pass
        with some.slot(TenantId("beta")):
            assert some.num_open == 2

    with some.slot(acme):
        assert some.num_open == 1
    assert some.num_open == 0


def with_keys(path: Path, clock: FakeClock, **fields: Any) -> Tenants:
    """Authentication by the keys of a file, as `headway keys` writes it."""
    return tenants_of(
        max_outstanding=2,
        keys=key_file(path),
        clock=clock,
        **fields,
    )


def test_a_key_of_the_file_is_valid_until_it_expires(tmp_path: Path):
    path, clock = tmp_path / "keys.json", FakeClock()
    with key_edit(path) as edit:
        _, key = edit.create(
            tenant=TenantId("acme"), scopes=(Scope.INFERENCE,), now=clock.now(), lifetime_s=60.0
        )
    some = with_keys(path, clock)
    assert some.authenticate(f"Bearer {key}") == "acme"
    clock.advance(60.0)

    with pytest.raises(ContractError) as caught:
        some.authenticate(f"Bearer {key}")

    assert caught.value.status == 401
    assert key not in str(caught.value)


def test_an_empty_file_of_keys_admits_no_request(tmp_path: Path):
    path = tmp_path / "keys.json"
    with key_edit(path):
        pass

    with pytest.raises(ContractError):
        with_keys(path, FakeClock()).authenticate(None)


def test_a_key_is_only_for_its_scopes(tmp_path: Path):
    path = tmp_path / "keys.json"
    with key_edit(path) as edit:
        _, key = edit.create(tenant=TenantId("ops"), scopes=(Scope.OPERATOR,), now=0.0)
    some = with_keys(path, FakeClock())
    assert some.authenticate(f"Bearer {key}", scope=None) == "ops"

    with pytest.raises(ContractError) as caught:
        some.authenticate(f"Bearer {key}")

    assert (caught.value.status, caught.value.code) == (403, "insufficient_scope")


def behind_proxy(keys: dict[str, str] | None = None) -> Tenants:
    return tenants_of(
        api_keys=keys or {},
        max_outstanding=2,
        identity_header="x-forwarded-user",
        trusted_proxies=networks_of(["10.1.0.0/16", "::1"]),
    )


@pytest.mark.parametrize("peer", ["10.1.2.3", "::1", "::ffff:10.1.2.3"])
def test_a_trusted_proxy_names_the_tenant(peer: str):
    headers = {"x-forwarded-user": "acme"}

    assert behind_proxy().authenticate(None, headers=headers, peer=peer) == "acme"


@pytest.mark.parametrize("peer", ["10.2.0.1", "127.0.0.1", "", None])
def test_no_other_address_names_a_tenant(peer: str | None):
    headers = {"x-forwarded-user": "acme"}
    some = behind_proxy({"k1": "beta"})

    assert some.authenticate("Bearer k1", headers=headers, peer=peer) == "beta"
    with pytest.raises(ContractError) as caught:
        some.authenticate(None, headers=headers, peer=peer)
    assert caught.value.status == 401


def test_without_the_header_a_trusted_proxy_needs_a_key():
    some = behind_proxy({"k1": "beta"})

    assert some.authenticate("Bearer k1", headers={}, peer="10.1.2.3") == "beta"
    with pytest.raises(ContractError):
        some.authenticate(None, headers={}, peer="10.1.2.3")


def test_an_invalid_address_of_a_proxy_is_refused():
    with pytest.raises(SettingsError, match="trusted_proxies"):
        networks_of(["proxy.example"])


def test_the_policy_limits_open_requests_of_one_gateway_also():
    policies = Policies(tenants={TenantId("acme"): TenantPolicy(concurrent_requests=1)})
    some = tenants_of(
        default_tenant="acme",
        max_outstanding=9,
        policies=policies,
    )

    with some.slot(TenantId("acme")), pytest.raises(CapacityError), some.slot(TenantId("acme")):
        pass
