"""Classification of requests into lanes, and names of lanes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.lanes import (
    LaneKey,
    LaneLayout,
    model_of,
    relegated_name,
)
from shared.contracts.qos import Importance
from solver.planning.lanes import (
    all_lanes,
    band_lower_edge_s,
    band_of,
    earlier_lanes,
    lane_for,
    longest_deadline_s,
    work_class_of,
)

LAYOUT = LaneLayout(first_band_s=0.5, band_ratio=2.0, num_bands=6)
layouts = st.builds(
    LaneLayout,
    first_band_s=st.floats(0.01, 10),
    band_ratio=st.floats(1.1, 10),
    num_bands=st.integers(1, 32),
    first_work_tokens=st.integers(1, 10_000),
    work_ratio=st.floats(1.1, 10),
    num_work_classes=st.integers(1, 32),
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
    work=st.integers(0, 31),
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


def test_each_band_begins_where_the_previous_one_ends():
    edges = [band_lower_edge_s(band, LAYOUT) for band in range(7)]
    assert edges == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf]


@given(layout=layouts, time_left_s=st.floats(0, 1e7))
def test_a_request_lies_between_the_edges_of_its_band(layout: LaneLayout, time_left_s: float):
    band = band_of(time_left_s, layout)
    assert band_lower_edge_s(band, layout) <= time_left_s * (1 + 1e-6)
    if band + 1 < layout.num_bands:
        assert time_left_s < band_lower_edge_s(band + 1, layout)


@given(layout=layouts, left=st.lists(st.floats(-10, 1e6), min_size=2, max_size=2))
def test_more_time_never_gives_an_earlier_band(layout: LaneLayout, left: list[float]):
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
            continue  # the band has no upper edge
        if layout.num_bands == 1:
            continue  # the only band has no upper edge
        edge_s = band_lower_edge_s(band, layout)
        width_s = layout.first_band_s if band == 0 else (layout.band_ratio - 1) * edge_s
        latest = -math.inf
        for _, deadline_at in queue:
            assert latest - deadline_at <= width_s + 1e-5 * (1 + edge_s)
            latest = max(latest, deadline_at)


@pytest.mark.parametrize(
    ("work_tokens", "work"),
    [
        (0, 0),
        (400, 0),
        (400.1, 1),
        (600, 1),
        (601, 2),
        (900, 2),
        (10_251, 8),
        (10_252, 9),
        (1e9, 9),
    ],
)
def test_work_classes_grow_by_half_and_the_last_is_open(work_tokens: float, work: int):
    assert work_class_of(work_tokens, LaneLayout()) == work


@given(layout=layouts, work_tokens=st.floats(0, 1e6))
def test_work_lies_between_the_edges_of_its_class(layout: LaneLayout, work_tokens: float):
    work = work_class_of(work_tokens, layout)
    assert 0 <= work < layout.num_work_classes
    upper = layout.first_work_tokens * layout.work_ratio**work
    if work < layout.num_work_classes - 1:
        assert work_tokens <= upper * (1 + 1e-6)
    if work > 0:
        assert work_tokens > upper / layout.work_ratio * (1 - 1e-6)


def test_lane_of_a_request():
    key = lane_for(
        model=ModelName("m"),
        importance=Importance.LOW,
        time_left_s=3.0,
        work_tokens=5000,
        layout=LAYOUT,
    )
    assert key.queue_name == "lane.2.m.low.3.w7"


@given(key=keys)
def test_a_lane_is_recovered_from_its_name(key: LaneKey):
    assert LaneKey.parse(key.queue_name) == key
    assert LaneKey.parse(key.overflow_name) == key


@given(key=keys)
def test_every_name_of_a_lane_gives_its_model(key: LaneKey):
    names = (key.queue_name, key.overflow_name, key.resume_name, relegated_name(key.model))
    assert [model_of(name) for name in names] == [key.model] * 4


@given(one=keys, other=keys)
def test_different_lanes_have_different_names(one: LaneKey, other: LaneKey):
    assert (one == other) == (one.queue_name == other.queue_name)


@pytest.mark.parametrize("model", ["org/Model-7B.v1.2", "a.b", "über/模型", "%2E", "lane", " "])
def test_unusual_model_names_give_lane_names_of_six_words(model: str):
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
        "lane.2.m.high.3.3",
        "lane.2.m.high.3.w",
        "lane.2.m.high.3.w03",
        "lane.2.m.high.3.w3-1",
        "lane.1.m.high.3.short-",
        "lane.1.m.high.3.short-0",
        "lane.1.m.high.3.short-01",
        "lane.1.m.high.3.short-x",
        "lane.1.m.high.3.short-1-2",
        "lane.1.m.n.high.3.short",
    ],
)
def test_other_names_are_not_lanes(name: str):
    with pytest.raises(ContractError, match="not a lane name"):
        LaneKey.parse(name)


def test_every_possible_lane_is_listed_once():
    lanes = all_lanes((ModelName("a"), ModelName("b")), LAYOUT)
    assert len(lanes) == len(set(lanes)) == 2 * 2 * 7 * 10


def test_lanes_of_version_1_are_listed_until_they_are_empty():
    names = {key.queue_name for key in earlier_lanes((ModelName("a"),), LAYOUT)}
    assert len(names) == 2 * 7 * 2 * 5
    assert {"lane.1.a.high.3.short", "lane.1.a.low.6.long-4"} <= names
    assert not names & {key.queue_name for key in all_lanes((ModelName("a"),), LAYOUT)}
    assert earlier_lanes((ModelName("a"),), LaneLayout(version=1)) == ()


@pytest.mark.parametrize(
    ("queue", "deadline_s"),
    [
        ("lane.2.m.high.0.w0", 0.5),
        ("lane.2.m%2E1.low.3.w9", 4.0),
        ("resume.2.m.3", 4.0),
        # The last band before best effort has no upper edge, and these wait behind others.
        ("lane.2.m.high.5.w0", None),
        ("lane.2.m.high.6.w0", None),
        ("overflow.2.m.high.3.w0", None),
        ("relegated.m", None),
        ("lane.1.m.high.3.short", None),
        ("inbox.a0", None),
        ("headway.global.rest", None),
    ],
)
def test_longest_deadline_of_a_queue_is_the_upper_edge_of_its_band(
    queue: str, deadline_s: float | None
):
    assert deadline_s == longest_deadline_s(queue, LAYOUT)


@given(layouts, st.floats(0.0, 1e6))
def test_no_request_of_a_band_has_a_longer_deadline(layout: LaneLayout, time_left_s: float):
    band = band_of(time_left_s, layout)
    longest = longest_deadline_s(f"lane.{layout.version}.m.high.{band}.w0", layout)

    assert longest is None or time_left_s <= longest * (1 + 1e-6)
