"""Which SLO a request gets, from all the places that can name one."""

import pytest

from services.gateway.headers import Hints
from services.gateway.openai import Body
from services.gateway.settings import Settings
from services.gateway.slo import requested_slo
from shared.contracts.errors import ContractError
from shared.contracts.qos import Slo

SETTINGS = Settings(
    default_stream_slo=Slo(ttft_s=2.0, tbt_s=0.2),
    default_slo=Slo(ttlt_s=60.0),
    tiers={"interactive": Slo(ttft_s=1.0, tbt_s=0.1), "batch": Slo()},
)


def slo_of(*, hints: Hints | None = None, **body: object) -> Slo:
    return requested_slo(Body(model="m", **body), hints or Hints(), SETTINGS)  # type: ignore[arg-type]  # test data


def test_nothing_given_means_the_default_of_the_way_it_is_answered():
    assert slo_of(stream=True) == Slo(ttft_s=2.0, tbt_s=0.2)
    assert slo_of() == Slo(ttlt_s=60.0)


def test_empty_slo_object_is_best_effort():
    assert slo_of(slo=Slo(), stream=True) == Slo()


def test_tier_names_an_slo():
    assert slo_of(hints=Hints(tier="interactive")) == Slo(ttft_s=1.0, tbt_s=0.1)
    assert slo_of(hints=Hints(tier="batch"), stream=True) == Slo()


def test_body_beats_tier():
    assert slo_of(hints=Hints(tier="interactive"), slo=Slo(ttlt_s=5.0)) == Slo(ttlt_s=5.0)


def test_headers_are_laid_over_field_by_field():
    given = slo_of(hints=Hints(ttft_s=0.5), slo=Slo(ttft_s=3.0, tbt_s=0.3))

    assert given == Slo(ttft_s=0.5, tbt_s=0.3)


def test_headers_alone_ask_for_nothing_else():
    assert slo_of(hints=Hints(ttlt_s=9.0), stream=True) == Slo(ttlt_s=9.0)


def test_deadline_of_the_body_counts_and_the_header_beats_it():
    assert slo_of(deadline=50.0) == Slo(deadline_at=50.0)
    assert slo_of(deadline=50.0, hints=Hints(deadline_at=40.0)) == Slo(deadline_at=40.0)


def test_unknown_tier_is_refused_with_those_there_are():
    with pytest.raises(ContractError, match="interactive, batch"):
        slo_of(hints=Hints(tier="platinum"))
