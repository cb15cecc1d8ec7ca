"""QLM §5's rules for models in host memory: which are warmed, which are cooled."""

from typing import Any, ClassVar

import pytest

from shared.contracts.base import ModelName
from shared.contracts.plans import Segment
from shared.contracts.telemetry import Residency
from solver.planning.lso.operations import Cool, Warm
from solver.planning.lso.situation import WarmSet
from tests.unit.solver.planning.chosen_lsos import actions, brief
from tests.unit.solver.planning.situations import A, B, C, D, segment


class TestWarmSet:
    """
    One model is active; next models are warm until host memory is full; others are cold.
    """

    SIZES: ClassVar[dict[ModelName, int]] = {A: 40, B: 30, C: 50, D: 20}

    def changes(
        self, queue: tuple[Segment, ...], budget: int, **residency: Residency
    ) -> list[tuple[Any, ...]]:
        warm_set = WarmSet(
            residency={
                **dict.fromkeys(self.SIZES, Residency.COLD),
                A: Residency.ACTIVE,
                **{ModelName(name): where for name, where in residency.items()},
            },
            num_bytes=self.SIZES,
            budget_bytes=budget,
        )
        lsos = actions(queue, warm_set=warm_set)
        return brief(tuple(lso for lso in lsos if isinstance(lso, Warm | Cool)))

    @pytest.mark.parametrize(
        ("budget", "warm"),
        [(0, []), (29, [D]), (30, [B]), (50, [B, D]), (80, [B, C]), (100, [B, C, D])],
    )
    def test_models_behind_the_head_are_warm_until_host_memory_is_full(
        self, budget: int, warm: list[ModelName]
    ):
        queue = (segment(A), segment(B), segment(C), segment(D))

        assert self.changes(queue, budget) == [("warm", model) for model in warm]

    def test_a_warm_model_is_not_warmed_again(self):
        assert self.changes((segment(A), segment(B)), 100, b=Residency.WARM) == []

    def test_a_model_without_waiting_requests_stays_while_there_is_memory(self):
        assert self.changes((segment(A), segment(B)), 50, d=Residency.WARM) == [("warm", B)]

    def test_models_without_waiting_requests_are_cooled_before_other_models_are_warmed(self):
        changes = self.changes((segment(A), segment(B)), 49, d=Residency.WARM)

        assert changes == [("cool", D), ("warm", B)]

    @pytest.mark.parametrize(
        ("budget", "kinds"),
        [(80, ["activate", "cool", "warm"]), (1000, ["activate", "warm"])],
        ids=["no room for both", "room"],
    )
    def test_the_replaced_model_is_warm_after_the_activation(self, budget: int, kinds: list[str]):
        queue = (segment(B), segment(C))

        assert [kind for kind, *_ in brief(actions(queue, warm_set=self.set_of(budget)))] == kinds

    def set_of(self, budget: int) -> WarmSet:
        return WarmSet(
            residency={A: Residency.ACTIVE, B: Residency.COLD, C: Residency.COLD},
            num_bytes=self.SIZES,
            budget_bytes=budget,
        )
