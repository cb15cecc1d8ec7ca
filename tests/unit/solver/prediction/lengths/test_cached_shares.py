"""Shares of prompts in prefix caches, by application."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.prediction.lengths.cached_shares import CachedShares, expected_cached_tokens

tokens = st.integers(0, 100_000)


def seen(cached: int, *, times: int, application: str = "chat") -> CachedShares:
    shares = CachedShares()
    for _ in range(times):
        shares.observe(application, prompt_tokens=100, cached_tokens=cached)
    return shares


def test_share_is_that_of_all_tokens_of_the_application() -> None:
    shares = seen(50, times=10)
    for _ in range(10):
        shares.observe("chat", prompt_tokens=900, cached_tokens=900)

    assert 0.9 < shares.share("chat") < 0.97
    assert shares.shares() == {"chat": shares.share("chat")}


def test_a_few_requests_have_no_share() -> None:
    assert seen(50, times=9).share("chat") == 0.0
    assert seen(50, times=10).share("chat") == pytest.approx(0.5)
    assert seen(50, times=10).share("search") == 0.0


def test_applications_without_cached_tokens_are_not_listed() -> None:
    assert seen(0, times=20).shares() == {}


def test_the_oldest_application_is_forgotten() -> None:
    shares = CachedShares(max_applications=2)
    for application in ("a", "b", "c"):
        for _ in range(10):
            shares.observe(application, prompt_tokens=10, cached_tokens=5)

    assert shares.shares().keys() == {"b", "c"}


@given(st.lists(st.tuples(tokens, tokens), min_size=10, max_size=40), tokens)
def test_at_least_one_token_is_computed(observed: list[tuple[int, int]], prompt: int) -> None:
    shares = CachedShares()
    for prompt_tokens, cached_tokens in observed:
        shares.observe("chat", prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    share = shares.share("chat")

    assert 0 <= share <= 1
    assert 0 <= expected_cached_tokens(share, prompt) <= max(0, prompt - 1)
