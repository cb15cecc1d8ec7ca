"""Classification into lanes, and lanes' names."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.lanes import (
    LaneKey,
    LaneLayout,
    WorkClass,
    model_of,
    relegated_name,
    work_version_of,
)
from shared.contracts.qos import Importance
from solver.planning.lanes import (
    all_lanes,
    band_lower_edge_s,
    band_of,
    is_bygone,
    lane_for,
    work_class_of,
)

LAYOUT = LaneLayout(first_band_s=0.5, band_ratio=2.0, num_bands=6)
layouts = st.builds(
    LaneLayout,
    first_band_s=st.floats(0.01, 10),
    band_ratio=st.floats(1.1, 10),
    num_bands=st.integers(1, 32),
    work_version=st.integers(0, 99),
)
models = st.text(min_size=1, max_size=60, alphabet=st.characters(exclude_categories=["Cs"])).map(
    ModelName
)
keys = st.builds(
    LaneKey.of,
    layouts,
    model=models,
    importance=st.sampled_from(Importance),
    band=st.integers(0, 32),
    work=st.sampled_from(WorkClass),
)


@pytest.mark.parametrize(
    ("time_left_s", "band"),
    [
        (-3600.0, 0),
        (0.0, 0),
        (0.499, 0),
        (0.5, 1),
        (0.999, 1),
        (1.0, 2),
        (3.999, 3),
        (4.0, 4),
        (8.0, 5),
        (1e9, 5),
        (math.inf, 6),
    ],
)
def test_bands_double_and_the_last_is_best_effort(time_left_s: float, band: int):
    assert band_of(time_left_s, LAYOUT) == band


def test_lower_edges_of_bands():
    edges = [band_lower_edge_s(band, LAYOUT) for band in range(7)]
    assert edges == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf]


@given(layout=layouts, time_left_s=st.floats(0, 1e7))
def test_a_request_lies_between_the_edges_of_its_band(layout: LaneLayout, time_left_s: float):
    band = band_of(time_left_s, layout)
    assert band_lower_edge_s(band, layout) <= time_left_s * (1 + 1e-6)
    if band + 1 < layout.num_bands:
        assert time_left_s < band_lower_edge_s(band + 1, layout)


@given(layout=layouts, left=st.lists(st.floats(-10, 1e6), min_size=2, max_size=2))
def test_more_time_is_never_a_sooner_band(layout: LaneLayout, left: list[float]):
    sooner, later = sorted(left)
    assert band_of(sooner, layout) <= band_of(later, layout)


@given(
    layout=layouts,
    arrivals=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1000)), min_size=2, max_size=40),
)
def test_fifo_in_a_lane_is_edf_up_to_one_band(
    layout: LaneLayout, arrivals: list[tuple[float, float]]
):
    by_band: dict[int, list[tuple[float, float]]] = {}
    for at, left_s in sorted(arrivals):
        by_band.setdefault(band_of(left_s, layout), []).append((at, at + left_s))
    for band, queue in by_band.items():
        if band >= layout.num_bands - 1 and layout.num_bands > 1:
            continue  # open-ended
        if layout.num_bands == 1:
            continue  # likewise
        edge_s = band_lower_edge_s(band, layout)
        width_s = layout.first_band_s if band == 0 else (layout.band_ratio - 1) * edge_s
        latest = -math.inf
        for _, deadline_at in queue:
            assert latest - deadline_at <= width_s + 1e-5 * (1 + edge_s)
            latest = max(latest, deadline_at)


def test_work_is_long_from_the_edge_on():
    assert [work_class_of(tokens, 100) for tokens in (99.9, 100)] == [
        WorkClass.SHORT,
        WorkClass.LONG,
    ]


def test_a_model_may_have_an_edge_of_its_own():
    layout = LaneLayout(work_edge_tokens=100, work_version=3, work_edges={"m": 40})
    names = [
        lane_for(
            model=ModelName(model),
            importance=Importance.LOW,
            time_left_s=math.inf,
            work_tokens=50,
            layout=layout,
        ).queue_name
        for model in ("m", "n")
    ]

    assert names == ["lane.1.m.low.12.long-3", "lane.1.n.low.12.short-3"]


def test_the_lanes_of_older_learnt_edges_are_still_looked_for():
    lanes = all_lanes((ModelName("m"),), LaneLayout(num_bands=1, work_version=6))

    versions = {work_version_of(lane.queue_name) for lane in lanes}
    assert versions == {0, 3, 4, 5, 6}
    assert len(lanes) == len({lane.queue_name for lane in lanes}) == 5 * 8


@pytest.mark.parametrize("name", ["lane.1.m.high.3.long-5", "overflow.1.a-7.high.3.short-5"])
def test_a_lane_is_bygone_four_versions_later(name: str):
    assert [is_bygone(name, version) for version in (0, 5, 8, 9)] == [False, False, False, True]


@pytest.mark.parametrize(
    "name",
    ["lane.1.a-7.high.3.short", "resume.1.m.5", "resume.1.m-2.5", "relegated.m-2", "inbox.i-3"],
)
def test_other_queues_are_never_bygone(name: str):
    assert work_version_of(name) == 0
    assert not is_bygone(name, 99)


def test_lane_of_a_request():
    key = lane_for(
        model=ModelName("m"),
        importance=Importance.LOW,
        time_left_s=3.0,
        work_tokens=5000,
        layout=LAYOUT,
    )
    assert key.queue_name == "lane.1.m.low.3.long"


@given(key=keys)
def test_a_lane_survives_its_names(key: LaneKey):
    assert LaneKey.parse(key.queue_name) == key
    assert LaneKey.parse(key.overflow_name) == key


@given(key=keys)
def test_a_lasting_lane_is_the_operators(key: LaneKey):
    assert work_version_of(key.lasting.queue_name) == 0
    assert key.lasting.resume_name == key.resume_name
    assert key.lasting.lasting == key.lasting


@given(key=keys)
def test_every_name_of_a_lane_leads_to_its_model(key: LaneKey):
    names = (key.queue_name, key.overflow_name, key.resume_name, relegated_name(key.model))
    assert [model_of(name) for name in names] == [key.model] * 4


@given(one=keys, other=keys)
def test_different_lanes_have_different_names(one: LaneKey, other: LaneKey):
    assert (one == other) == (one.queue_name == other.queue_name)


@pytest.mark.parametrize("model", ["org/Model-7B.v1.2", "a.b", "über/模型", "%2E", "lane", " "])
def test_awkward_models_have_names_of_six_words(model: str):
    key = LaneKey(layout=1, model=ModelName(model), importance="high", band=3, work="short")
    assert len(key.queue_name.split(".")) == 6
    assert LaneKey.parse(key.queue_name).model == model


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lane",
        "resume.1.m.3",
        "lane.1.m.high.3",
        "lane.x.m.high.3.short",
        "lane.1.m.middle.3.short",
        "lane.1.m.high.b.short",
        "lane.1.m.high.3.medium",
        "lane.1.m.high.3.short-",
        "lane.1.m.high.3.short-0",
        "lane.1.m.high.3.short-01",
        "lane.1.m.high.3.short-x",
        "lane.1.m.high.3.short-1-2",
        "lane.1.m.n.high.3.short",
    ],
)
def test_other_names_are_no_lanes(name: str):
    with pytest.raises(ContractError, match="not a lane name"):
        LaneKey.parse(name)


def test_every_possible_lane_is_listed_once():
    lanes = all_lanes((ModelName("a"), ModelName("b")), LAYOUT)
    assert len(lanes) == len(set(lanes)) == 2 * 2 * 7 * 2
