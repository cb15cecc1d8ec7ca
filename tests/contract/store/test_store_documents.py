"""Documents of the store: versions, and services that follow them."""

import json

import pytest

from shared.contracts.base import TenantId
from shared.contracts.errors import SettingsError, StoreUnavailableError
from shared.store.documents import KEYS, TENANTS, Document
from shared.store.store import Store
from shared.tenants.keys import KeyEdit, KeyWatch, decode_keys, encode_keys
from shared.tenants.policies import WatchedPolicies, open_policies
from shared.tenants.watched import STORE, WatchedDocument
from tests.clocks import FakeClock

ACME = TenantId("acme")
KEPT_S = 60.0


def policies(weight: float) -> bytes:
    return json.dumps({"tenants": {ACME: {"weight": weight}}}).encode()


async def test_each_change_makes_the_next_version(store: Store):
    assert await store.documents.get(TENANTS) is None
    first = await store.documents.put(TENANTS, policies(2), after=0)
    second = await store.documents.put(TENANTS, policies(3), after=first)

    assert (first, second) == (1, 2)
    assert await store.documents.get(TENANTS) == Document(content=policies(3), version=2)


@pytest.mark.parametrize("after", [0, 2])
async def test_a_change_of_another_version_is_refused(store: Store, after: int):
    await store.documents.put(TENANTS, policies(2), after=0)

    with pytest.raises(SettingsError, match="'tenants' of the store has changed meanwhile"):
        await store.documents.put(TENANTS, policies(3), after=after)


async def test_policies_of_the_store_are_followed(store: Store):
    followed = await open_policies(STORE, store, kept_s=KEPT_S)
    assert isinstance(followed, WatchedPolicies)
    before = followed.policy(ACME).weight
    await store.documents.put(TENANTS, policies(2), after=0)
    await followed._source.apply()
    changed = followed.policy(ACME).weight
    await store.documents.put(TENANTS, b'{"tenants": {"acme": {"weight": -1}}}', after=1)
    await followed._source.apply()

    assert (before, changed, followed.policy(ACME).weight) == (1.0, 2.0, 2.0)
    assert "weight" in followed.state.refused


async def test_without_a_store_its_documents_are_refused():
    with pytest.raises(SettingsError, match=r"store\.data_dir"):
        await open_policies(STORE, None)


async def test_keys_are_valid_for_a_time_while_the_database_is_away(store: Store):
    edit = KeyEdit()
    _, key = edit.create(tenant=ACME, scopes=(), now=0.0)
    content = encode_keys(edit.keys)
    clock = FakeClock()
    document = WatchedDocument(store, KEYS, decode_keys, content, kept_s=KEPT_S, clock=clock)
    keys = KeyWatch(document)
    await store.documents.put(KEYS, content, after=0)

    store.problem = "away"
    clock.advance(KEPT_S)
    await keys.apply()
    found = keys.find(key)
    clock.advance(1.0)
    with pytest.raises(StoreUnavailableError, match="documents_kept_s"):
        keys.find(key)
    store.problem = None
    await keys.apply()

    assert found is not None
    assert keys.find(key) == found
