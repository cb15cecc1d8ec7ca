"""Authentication, tenants, and limits of open requests."""

import pytest

from services.gateway.headers import Hints
from services.gateway.tenants import Tenants
from shared.contracts.base import TenantId
from shared.contracts.errors import CapacityError, ContractError


def tenants(*, keys: dict[str, str] | None = None, trust: bool = False, limit: int = 2) -> Tenants:
    return Tenants(
        api_keys=keys or {},
        default_tenant="default",
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
