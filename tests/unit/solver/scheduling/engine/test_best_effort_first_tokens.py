"""Limits of best-effort work in iterations in which first tokens are due."""

from dataclasses import replace

import pytest

from shared.contracts.qos import Slo
from solver.scheduling.engine.options import SchedulingOptions
from tests.unit.solver.scheduling.best_effort_rig import CHAT, DUMP, OPTIONS, Rig


class TestFirstTokens:
    """A prompt of 1000 tokens takes 0.1 s; its first token is due at 1 s."""

    SPARING = replace(OPTIONS, best_effort_spares_first_tokens=True)

    @staticmethod
    def budget(options: SchedulingOptions, slo: Slo, now: float) -> int:
        rig = Rig(options)
        rig.wait("asked", slo)
        rig.wait("dump", DUMP, prompt=5000)
        decision = rig.decide(now)

        assert list(decision.order) == ["asked", "dump"]
        return decision.token_budget

    @pytest.mark.parametrize(
        ("now", "budget"),
        [(0.5, 2500), (0.8, 1750), (0.899, 1007)],
        ids=["plenty", "three quarters of the time to spare", "hardly any"],
    )
    def test_best_effort_takes_the_spare_time_of_the_first_token(self, now: float, budget: int):
        assert self.budget(self.SPARING, CHAT, now) == pytest.approx(budget, abs=1)

    @pytest.mark.parametrize("slo", [Slo(ttlt_s=1), Slo(ttft_s=60, tbt_s=1)], ids=["whole", "far"])
    def test_other_or_distant_first_tokens_set_no_limit(self, slo: Slo):
        assert self.budget(self.SPARING, slo, 0.8) == 2500

    def test_a_late_first_token_gets_its_target_once_more(self):
        """The late prompt takes 0.1 s of an additional target of 0.2 s."""
        assert self.budget(self.SPARING, Slo(ttft_s=0.2, tbt_s=1), 5.0) == pytest.approx(
            1750, abs=1
        )

    def test_best_effort_pauses_beside_a_prompt_that_exceeds_its_target(self):
        rig = Rig(self.SPARING)
        rig.wait("asked", Slo(ttft_s=0.05, tbt_s=1))
        rig.wait("dump", DUMP, prompt=5000)

        assert rig.decide(5.0).token_budget == 1000

    def test_the_papers_variant_ignores_first_tokens(self):
        assert self.budget(OPTIONS, CHAT, 0.8) == 2500

    def test_a_prefill_that_does_not_end_sets_no_limit(self):
        """The prefill's first token does not come in this iteration."""
        rig = Rig(replace(self.SPARING, max_chunk_tokens=500))
        rig.wait("asked", CHAT)
        rig.wait("dump", DUMP, prompt=5000)

        assert rig.decide(0.95).token_budget == 500
