"""Samples of prefill times: kept, bounded, and none that harms."""

import math
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.estimator.handlers import HANDLERS
from services.estimator.keys import directory_name
from services.estimator.sample_files import Samples, read_samples
from services.estimator.sample_store import DISK, SampleStore
from services.estimator.state import EstimatorState
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import Settlement
from shared.contracts.base import encode
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.sampled import KEY, plain, sampled


def store(directory: Path | None, *, most: int = 20_000) -> SampleStore:
    """Of an estimator that has just begun."""
    opened = SampleStore(directory, most=most)
    opened.open()
    return opened


def kept(directory: Path, *, most: int = 20_000) -> Samples:
    found = read_samples(directory, most=most)
    assert found.problems == []
    return found.by_key[KEY]


def files(directory: Path) -> list[str]:
    return sorted(file.name for file in (directory / directory_name(KEY)).iterdir())


def take(into: SampleStore, *times_s: float) -> None:
    into.take(sampled(*(plain(each, prompt_tokens=10.0) for each in times_s)))


def test_what_was_told_is_read_again(tmp_path: Path):
    into = store(tmp_path)
    into.take(sampled(plain(0.25, prompt_tokens=7.0, kv_utilization=0.5), at=NOW))
    into.take(sampled(plain(0.5, cached_tokens=3.0), at=NOW + 1))
    samples = kept(tmp_path)

    assert list(samples.prefill_s) == [0.25, 0.5]
    assert list(samples.at) == [NOW, NOW + 1]
    assert list(samples.features[0]) == [7.0, *[0.0] * 9, 0.5]
    assert list(samples.features[1]) == [*[0.0] * 6, 3.0, *[0.0] * 4]
    assert dict(into.kept()) == {KEY: 2}


def test_keys_are_kept_apart(tmp_path: Path):
    into = store(tmp_path)
    take(into, 0.1, 0.2)
    into.take(sampled(plain(0.3), model="org-model.v1"))
    found = read_samples(tmp_path, most=10)

    assert {key: list(each.prefill_s) for key, each in found.by_key.items()} == {
        KEY: [0.1, 0.2],
        ("org-model.v1", "simulated", "cpu"): [0.3],
    }


def test_the_latest_are_kept_and_never_twice_as_many(tmp_path: Path):
    into = store(tmp_path, most=10)
    for number in range(100):
        take(into, 1 + 2 * number, 2 + 2 * number)
        assert min(10, 2 * number + 2) <= dict(into.kept())[KEY] <= 20

    assert list(kept(tmp_path, most=10).prefill_s) == list(range(191, 201))
    assert len(files(tmp_path)) == 2


def test_a_restart_goes_on_where_the_last_one_ended(tmp_path: Path):
    for number in range(1, 8):
        into = store(tmp_path, most=3)
        take(into, number)

    assert list(kept(tmp_path).prefill_s) == [4, 5, 6, 7]
    assert dict(store(tmp_path, most=3).kept()) == {KEY: 4}


def test_a_torn_line_is_left_out_and_cut_off(tmp_path: Path):
    take(store(tmp_path), 0.1, 0.2)
    file = next(tmp_path.rglob("*.jsonl"))
    file.write_bytes(file.read_bytes()[:-5])

    torn = read_samples(tmp_path, most=10)
    assert list(torn.by_key[KEY].prefill_s) == [0.1]
    assert torn.problems == [
        f"{file}: 1 lines left out; the first one is line 3: Input data was truncated"
    ]
    with capture_logs() as logs:
        take(store(tmp_path), 0.3)
    assert [each["event"] for each in logs] == ["samples.torn"]
    assert list(kept(tmp_path).prefill_s) == [0.1, 0.3]


@pytest.mark.parametrize("left", [0, 10])
def test_a_file_that_was_hardly_begun_is_begun_again(tmp_path: Path, left: int):
    take(store(tmp_path), 0.1)
    file = next(tmp_path.rglob("*.jsonl"))
    file.write_bytes(file.read_bytes()[:left])
    take(store(tmp_path), 0.2)

    assert list(kept(tmp_path).prefill_s) == [0.2]


def test_samples_of_another_schema_are_counted_and_told_of_once(tmp_path: Path):
    into = store(tmp_path)
    with capture_logs() as logs:
        for _ in range(3):
            into.take(sampled(plain(), plain(), schema_version=2))
        into.take(sampled(plain(), schema_version=2, sender="planner-2"))

    assert into.refused == {"schema_version": 7}
    assert [(each["sender"], each["found"], each["expected"]) for each in logs] == [
        ("planner-1", 2, 1),
        ("planner-2", 2, 1),
    ]
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_schema_are_neither_read_nor_appended_to(tmp_path: Path):
    take(store(tmp_path), 0.1)
    file = next(tmp_path.rglob("*.jsonl"))
    file.write_bytes(file.read_bytes().replace(b'"schema_version":1', b'"schema_version":9'))
    take(store(tmp_path), 0.2)
    found = read_samples(tmp_path, most=10)

    assert list(found.by_key[KEY].prefill_s) == [0.2]
    assert found.problems == [f"{file}: schema_version is 9; here it is 1; the file is left out"]


def test_a_sample_that_cannot_be_is_refused_by_field_and_the_others_are_kept(tmp_path: Path):
    into = store(tmp_path)
    with capture_logs() as logs:
        for _ in range(2):
            into.take(
                sampled(
                    plain(0.1),
                    plain(math.nan),
                    plain(0.2, running=-1.0),
                    plain(0.3, prompt_tokens=math.inf),
                )
            )

    assert into.refused == {"prefill_s": 2, "running": 2, "prompt_tokens": 2}
    assert [each["field"] for each in logs] == ["prefill_s", "running", "prompt_tokens"]
    assert list(kept(tmp_path).prefill_s) == [0.1, 0.1]


def test_lines_that_cannot_be_are_left_out(tmp_path: Path):
    take(store(tmp_path), 0.1)
    file = next(tmp_path.rglob("*.jsonl"))
    with file.open("ab") as stream:
        stream.write(b"[1.0,-1.0," + msgspec.json.encode([0.0] * 11) + b"]\n[]\n")
    found = read_samples(tmp_path, most=10)

    assert list(found.by_key[KEY].prefill_s) == [0.1]
    assert found.problems == [
        f"{file}: 2 lines left out; the first one is line 3: prefill_s is out of bounds"
    ]


def test_without_a_directory_nothing_is_kept():
    into = store(None)
    take(into, 0.1)

    assert dict(into.kept()) == {}


def test_a_disk_that_takes_nothing_costs_samples_and_nothing_else(tmp_path: Path):
    (tmp_path / "samples").write_text("in the way")
    into = SampleStore(tmp_path / "samples", most=10)
    with capture_logs() as logs:
        take(into, 0.1)

    assert into.refused == {DISK: 1}
    assert [each["event"] for each in logs] == ["samples.lost"]
    (tmp_path / "samples").unlink()
    take(into, 0.2)
    assert list(kept(tmp_path / "samples").prefill_s) == [0.2]


def test_a_file_that_cannot_be_read_is_no_reason_not_to_begin(tmp_path: Path):
    folder = tmp_path / directory_name(KEY)
    (folder / "1.jsonl").mkdir(parents=True)
    with capture_logs() as logs:
        into = store(tmp_path)

    assert [each["event"] for each in logs] == ["samples.unreadable"]
    assert dict(into.kept()) == {}


async def test_messages_are_kept_and_one_that_is_no_number_harms_nobody(tmp_path: Path):
    state = EstimatorState(
        iteration_memory=100, request_memory=100, max_applications=1, samples=store(tmp_path)
    )
    handle = Dispatcher(HANDLERS, state).handle
    good = LooseDelivery(body=encode(sampled(plain(0.1))))
    # JSON has no such number: on the wire it is none.
    bad = LooseDelivery(body=encode(sampled(plain(math.nan))))
    for delivery in (good, bad, good):
        await handle(delivery)

    assert good.settlements == [Settlement.ACK, Settlement.ACK]
    assert bad.settlements == [Settlement.REJECT]
    assert list(kept(tmp_path).prefill_s) == [0.1, 0.1]
