"""Claims of requests on host copies of KV, compared with the rule that defines them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.agent.backends.host_claims import HostClaims
from services.agent.backends.host_index import HostIndex

KINDS = ["begin", "begin", "grow", "grow", "grow", "leave", "leave", "finish", "finish", "clear"]
TEXTS = ["", "a", "a", "aa", "b"]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from("pqr"), st.sampled_from(TEXTS)),
    min_size=30,
    max_size=60,
)


def hashes_of(text: str) -> list[bytes]:
    """Hashes of a sequence of blocks with one character each."""
    return [text[:end].encode() for end in range(1, len(text) + 1)]


class World:
    """Requests whose blocks all have copies, and an index that keeps what it should."""

    def __init__(self) -> None:
        self.index, self.expected = HostIndex(1000), HostIndex(1000)
        self.claims = HostClaims(self.index)
        self.running: dict[str, str] = {}
        self.left: dict[str, str] = {}

    def do(self, action: str, origin: str, text: str) -> None:
        if action == "begin":
            self.left.pop(origin, None)
            self.running[origin] = text
            self.claims.begin(origin, lambda: hashes_of(self.running[origin]))
        elif action == "clear":
            self.index.clear()
            self.expected.clear()
            self.claims.clear()
            self.left.clear()
        elif origin not in self.running:
            return
        elif action == "grow":
            self.running[origin] += text
            self.index.store(hashes_of(self.running[origin]))
            self.expected.store(hashes_of(self.running[origin]))
        elif action == "leave":
            self.claims.leave(origin)
            self.left[origin] = self.running.pop(origin)
        else:
            self.claims.finish(origin)
            own = self.running.pop(origin)
            others = [*self.running.values(), *self.left.values()]
            claimed = {content for other in others for content in hashes_of(other)}
            shared = claimed.intersection(hashes_of(own))
            self.expected.release(hashes_of(own), keep=len(shared))


@given(ACTIONS)
def test_finish_keeps_exactly_the_copies_that_other_requests_claim(
    actions: Sequence[tuple[str, str, str]],
) -> None:
    world = World()
    texts = set[str]()
    for action in actions:
        world.do(*action)
        texts |= {*world.running.values(), *world.left.values()}

        assert world.index.num_used == world.expected.num_used
        for text in texts:
            known = world.index.num_known(hashes_of(text))
            assert known == world.expected.num_known(hashes_of(text))


@given(ACTIONS)
def test_nothing_is_counted_after_all_requests_have_ended(
    actions: Sequence[tuple[str, str, str]],
) -> None:
    world = World()
    for action in actions:
        world.do(*action)
    for origin in "pqr":
        world.do("finish", origin, "")
    world.do("clear", "", "")

    assert not world.claims._counts
