"""A request's SLO from each of its sources: body, headers and defaults."""

import pytest

from services.gateway.headers import Hints
from services.gateway.settings import Settings
from services.gateway.slo import requested_slo
from shared.api.calls import CallBody
from shared.contracts.errors import ContractError
from shared.contracts.qos import Slo

SETTINGS = Settings(
    default_stream_slo=Slo(ttft_s=2.0, tbt_s=0.2),
    default_slo=Slo(ttlt_s=60.0),
    objectives={"interactive": Slo(ttft_s=1.0, tbt_s=0.1), "night": Slo()},
)


def slo_of(*, hints: Hints | None = None, **body: object) -> Slo:
    return requested_slo(CallBody(model="m", **body), hints or Hints(), SETTINGS)  # type: ignore[arg-type]  # test data


def test_default_slo_depends_on_streaming():
    assert slo_of(stream=True) == Slo(ttft_s=2.0, tbt_s=0.2)
    assert slo_of() == Slo(ttlt_s=60.0)


def test_empty_slo_object_is_best_effort():
    assert slo_of(slo=Slo(), stream=True) == Slo()


def test_objective_selects_an_slo():
    assert slo_of(hints=Hints(objective="interactive")) == Slo(ttft_s=1.0, tbt_s=0.1)
    assert slo_of(hints=Hints(objective="night"), stream=True) == Slo()


def test_slo_in_the_body_overrides_the_objective():
    assert slo_of(hints=Hints(objective="interactive"), slo=Slo(ttlt_s=5.0)) == Slo(ttlt_s=5.0)


def test_headers_override_field_by_field():
    given = slo_of(hints=Hints(ttft_s=0.5), slo=Slo(ttft_s=3.0, tbt_s=0.3))

    assert given == Slo(ttft_s=0.5, tbt_s=0.3)


def test_headers_alone_set_no_other_target():
    assert slo_of(hints=Hints(ttlt_s=9.0), stream=True) == Slo(ttlt_s=9.0)


def test_deadline_of_the_body_is_overridden_by_the_header():
    assert slo_of(deadline=50.0) == Slo(deadline_at=50.0)
    assert slo_of(deadline=50.0, hints=Hints(deadline_at=40.0)) == Slo(deadline_at=40.0)


def test_unknown_objective_is_refused_with_the_known_objectives():
    with pytest.raises(ContractError, match="interactive, night"):
        slo_of(hints=Hints(objective="platinum"))


@pytest.mark.parametrize(("name", "slo"), [("async", Slo(ttlt_s=300.0)), ("batch", Slo())])
def test_llm_ds_objectives_map_to_the_qos_classes(name: str, slo: Slo):
    body = CallBody(model="m")

    assert requested_slo(body, Hints(objective=name), Settings()) == slo


def test_a_configured_objective_overrides_an_alias():
    settings = Settings(objectives={"batch": Slo(ttlt_s=9.0), "best_effort": Slo()})

    assert requested_slo(CallBody(model="m"), Hints(objective="batch"), settings) == Slo(ttlt_s=9.0)
