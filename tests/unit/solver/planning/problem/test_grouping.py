"""Request groups by QLM's algorithm 1, from lane counters."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from shared.contracts.lanes import LaneKey, LaneLayout
from shared.contracts.qos import Importance
from solver.planning.problem.grouping import LaneStatistics, Spread, group_size, groups_of

KEY = LaneKey.of(LaneLayout(), model=ModelName("m"), importance=Importance.LOW, band=5, work=0)


def lane(waiting: int, **fields: object) -> LaneStatistics:
    known = {
        "key": KEY,
        "waiting": waiting,
        "prompt_tokens": Spread(100.0),
        "output_tokens": Spread(20.0),
        "time_left_s": 60.0,
    }
    return LaneStatistics(**(known | fields))


class TestSizes:
    def test_a_batch_group_holds_four_average_batches(self):
        hour = lane(1, time_left_s=3600.0)

        assert group_size(hour, average_batch=128, token_rate_per_s=1000) == 512

    def test_a_group_with_little_time_is_smaller_for_any_deadline_kind(self):
        """In 15 s, 15,000 tokens are computed: 125 requests of 120 tokens."""
        assert group_size(lane(1), average_batch=128, token_rate_per_s=1000) == 64

    def test_an_interactive_group_is_served_in_a_quarter_of_its_time(self):
        """2500 tokens in 2.5 s are 20 requests of 120 tokens; the next lower power of 2 is 16."""
        size = group_size(
            lane(1, interactive=True, time_left_s=10.0), average_batch=128, token_rate_per_s=1000
        )

        assert size == 16

    @pytest.mark.parametrize(
        ("activate_s", "size"), [(math.inf, 128), (60.0, 128), (12.0, 64), (0.1, 32)]
    )
    def test_a_group_takes_at_most_four_activations_but_a_batch_is_not_divided(
        self, activate_s: float, size: int
    ):
        """48 s are enough for 100 requests of 120 tokens, and 64 is the next lower power of 2."""
        found = group_size(
            lane(1, time_left_s=math.inf),
            average_batch=32,
            token_rate_per_s=250,
            activate_s=activate_s,
        )
        assert found == size

    def test_a_lane_with_many_groups_is_not_divided_further(self):
        many = lane(100_000, time_left_s=math.inf)

        assert group_size(many, average_batch=32, token_rate_per_s=250, activate_s=0.1) == 128

    def test_a_group_holds_at_least_one_request(self):
        slow = lane(1, interactive=True, time_left_s=0.01)

        assert group_size(slow, average_batch=0.1, token_rate_per_s=1) == 1

    def test_best_effort_is_bounded_by_its_batch_alone(self):
        endless = lane(1, interactive=True, time_left_s=math.inf)

        assert group_size(endless, average_batch=2, token_rate_per_s=1) == 8


class TestGroups:
    def test_an_empty_lane_has_no_groups(self):
        assert groups_of(lane(0), size=4, now=0.0) == []

    def test_deadlines_are_derived_from_enqueue_times(self):
        arrivals = [(100.0, 1.0), (107.0, 8.0)]  # one arrival per second
        groups = groups_of(lane(6, arrivals=arrivals), size=4, now=200.0)

        assert [(g.group_id.number, g.num_requests) for g in groups] == [(0, 2), (1, 4)]
        assert [g.oldest_deadline_at for g in groups] == [162.0, 164.0]
        assert [g.youngest_deadline_at for g in groups] == [163.0, 167.0]

    def test_unknown_arrivals_count_as_just_arrived(self):
        (group,) = groups_of(lane(3), size=4, now=200.0)

        assert (group.oldest_deadline_at, group.youngest_deadline_at) == (260.0, 260.0)

    def test_best_effort_has_no_deadline(self):
        (group,) = groups_of(lane(3, time_left_s=math.inf), size=4, now=200.0)

        assert group.oldest_deadline_at == group.youngest_deadline_at == math.inf

    def test_groups_keep_their_identity_while_the_lane_moves(self):
        before = lane(10, arrivals=[(0.0, 1.0), (9.0, 10.0)])
        # 6 requests have left and 5 have arrived.
        after = replace(before, waiting=9, arrivals=[(0.0, 1.0), (14.0, 15.0)])

        old = {g.group_id: g.num_requests for g in groups_of(before, size=4, now=10.0)}
        new = {g.group_id: g.num_requests for g in groups_of(after, size=4, now=15.0)}

        assert [g.number for g in old] == [0, 1, 2]
        assert [g.number for g in new] == [1, 2, 3]

    @given(
        waiting=st.integers(0, 3000),
        served=st.integers(0, 3000),
        size=st.sampled_from([1, 4, 64, 512]),
    )
    def test_every_request_is_in_one_group(self, waiting: int, served: int, size: int):
        total = waiting + served
        arrivals = [(0.0, 1.0), (50.0, float(total))] if total > 1 else []
        groups = groups_of(lane(waiting, arrivals=arrivals), size=size, now=60.0)

        assert sum(group.num_requests for group in groups) == waiting
        assert all(0 < group.num_requests <= size for group in groups)
        assert len({group.group_id for group in groups}) == len(groups)
        deadlines = [d for g in groups for d in (g.oldest_deadline_at, g.youngest_deadline_at)]
        assert deadlines == sorted(deadlines)

    def test_waiting_requests_beyond_the_known_arrivals_count_as_oldest(self):
        """Requests without a known arrival come from companion queues or from before a restart."""
        groups = groups_of(lane(10, arrivals=[(5.0, 4.0)]), size=8, now=9.0)

        assert [group.num_requests for group in groups] == [8, 2]
        assert groups[0].oldest_deadline_at == pytest.approx(65.0)
