"""Tenants' shares of outstanding work."""

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import TenantId
from solver.routing.shares import TenantShares

A, B = TenantId("a"), TenantId("b")
actions = st.lists(
    st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from([A, B]), st.integers(1, 1000)),
    max_size=60,
)


def shares(*, max_share: float = 0.6, free_tokens: int = 100) -> TenantShares:
    return TenantShares(max_share=max_share, free_tokens=free_tokens)


@given(actions=actions)
def test_totals_are_the_sums_of_outstanding_tokens(
    actions: list[tuple[bool, int, TenantId, int]],
):
    """Repeated or unknown requests do not change the totals."""
    counted, expected = shares(), dict[str, tuple[TenantId, int]]()
    for admits, number, tenant, tokens in actions:
        if admits:
            counted.admit(str(number), tenant, tokens)
            expected.setdefault(str(number), (tenant, tokens))
        else:
            counted.finish(str(number))
            expected.pop(str(number), None)
        for each in (A, B):
            held = sum(tokens for tenant, tokens in expected.values() if tenant == each)
            assert counted.outstanding(each) == held
        assert counted.total == counted.outstanding(A) + counted.outstanding(B)


@given(tokens=st.lists(st.integers(1, 10**6), max_size=20))
def test_a_single_tenant_is_never_above_its_share(tokens: list[int]):
    counted = shares(max_share=0.01, free_tokens=0)
    for number, each in enumerate(tokens):
        assert not counted.above_share(A, each)
        counted.admit(str(number), A, each)


def test_a_tenant_beside_others_may_hold_its_share_and_no_more():
    """
    Beside 400 tokens of other tenants, 600 of 1000 tokens are 60 %; 610 of 1010 tokens are more.
    """
    counted = shares()
    counted.admit("b", B, 400)
    counted.admit("a", A, 500)
    assert not counted.above_share(A, 100)
    assert counted.above_share(A, 110)


def test_little_work_is_never_above_a_share():
    counted = shares()
    counted.admit("b", B, 1)
    assert not counted.above_share(A, 100)
    assert counted.above_share(A, 101)


def test_a_share_recovers_as_work_ends():
    counted = shares()
    counted.admit("b", B, 100)
    counted.admit("a", A, 900)
    assert counted.above_share(A, 10)
    counted.finish("a")
    assert not counted.above_share(A, 10)


def test_request_without_tokens_may_end_after_the_other_requests_of_its_tenant() -> None:
    shares = TenantShares(max_share=0.5, free_tokens=0)
    shares.admit("r1", TenantId("a"), 10)
    shares.admit("empty", TenantId("a"), 0)
    shares.finish("r1")
    shares.finish("empty")
    assert (shares.total, shares.outstanding(TenantId("a"))) == (0, 0)
