"""Storage of samples of prefill times: bounds, and handling of invalid samples."""

import math
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.estimator.handlers import HANDLERS
from services.estimator.state import EstimatorState
from services.estimator.trees.artefact_names import directory_name
from services.estimator.trees.sample_files import Samples, read_samples
from services.estimator.trees.sample_store import DISK, SampleStore
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import Settlement
from shared.contracts.base import encode
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.sampled import KEY, plain, sampled


def store(directory: Path | None, *, most: int = 20_000) -> SampleStore:
    """The sample store of a newly started estimator."""
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


def test_stored_samples_are_read_back(tmp_path: Path):
    into = store(tmp_path)
    into.take(sampled(plain(0.25, prompt_tokens=7.0, kv_utilization=0.5), at=NOW))
    into.take(sampled(plain(0.5, cached_tokens=3.0), at=NOW + 1))
    samples = kept(tmp_path)

    assert list(samples.prefill_s) == [0.25, 0.5]
    assert list(samples.at) == [NOW, NOW + 1]
    assert list(samples.features[0]) == [7.0, *[0.0] * 9, 0.5]
    assert list(samples.features[1]) == [*[0.0] * 6, 3.0, *[0.0] * 4]
    assert dict(into.kept()) == {KEY: 2}


def test_keys_are_stored_separately(tmp_path: Path):
    into = store(tmp_path)
    take(into, 0.1, 0.2)
    into.take(sampled(plain(0.3), model="org-model.v1"))
    found = read_samples(tmp_path, most=10)

    assert {key: list(each.prefill_s) for key, each in found.by_key.items()} == {
        KEY: [0.1, 0.2],
        ("org-model.v1", "simulated", "cpu"): [0.3],
    }


def test_latest_samples_are_kept_up_to_twice_the_limit(tmp_path: Path):
    into = store(tmp_path, most=10)
    for number in range(100):
        take(into, 1 + 2 * number, 2 + 2 * number)
        assert min(10, 2 * number + 2) <= dict(into.kept())[KEY] <= 20

    assert list(kept(tmp_path, most=10).prefill_s) == list(range(191, 201))
    assert files(tmp_path) == ["earlier.jsonl", "latest.jsonl"]


def test_restart_continues_the_files(tmp_path: Path):
    for number in range(1, 8):
        into = store(tmp_path, most=3)
        take(into, number)

    assert list(kept(tmp_path).prefill_s) == [4, 5, 6, 7]
    assert dict(store(tmp_path, most=3).kept()) == {KEY: 4}


def test_incomplete_line_is_skipped_and_cut_off(tmp_path: Path):
    into = store(tmp_path)
    take(into, 0.1)
    take(into, 0.2)
    file = next(tmp_path.rglob("*.jsonl"))
    file.write_bytes(file.read_bytes()[:-2])

    torn = read_samples(tmp_path, most=10)
    assert list(torn.by_key[KEY].prefill_s) == [0.1]
    (problem,) = torn.problems
    assert problem.startswith(f"{file}: 1 lines skipped; the first one is line 2: ")
    assert problem.endswith("Input data was truncated")
    with capture_logs() as logs:
        take(store(tmp_path), 0.3)
    assert [each["event"] for each in logs] == ["samples.torn"]
    assert list(kept(tmp_path).prefill_s) == [0.1, 0.3]


@pytest.mark.parametrize("left", [0, 10])
def test_file_with_an_incomplete_first_line_is_restarted(tmp_path: Path, left: int):
    take(store(tmp_path), 0.1)
    file = next(tmp_path.rglob("*.jsonl"))
    file.write_bytes(file.read_bytes()[:left])
    take(store(tmp_path), 0.2)

    assert list(kept(tmp_path).prefill_s) == [0.2]


def test_samples_of_another_schema_are_counted_and_logged_once(tmp_path: Path):
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


def test_lines_of_another_schema_are_skipped(tmp_path: Path):
    take(store(tmp_path), 0.1)
    file = next(tmp_path.rglob("*.jsonl"))
    file.write_bytes(file.read_bytes().replace(b'"schema_version":1', b'"schema_version":9'))
    take(store(tmp_path), 0.2)
    found = read_samples(tmp_path, most=10)

    assert list(found.by_key[KEY].prefill_s) == [0.2]
    assert found.problems == [
        f"{file}: 1 lines skipped; the first one is line 1: schema_version is 9, expected 1"
    ]


def test_invalid_sample_is_refused_by_field_and_valid_samples_are_kept(tmp_path: Path):
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


def test_invalid_lines_are_skipped(tmp_path: Path):
    take(store(tmp_path), 0.1)
    file = next(tmp_path.rglob("*.jsonl"))
    with file.open("ab") as stream:
        stream.write(encode(sampled(plain(-1.0))) + b"\n[]\n")
    found = read_samples(tmp_path, most=10)

    assert list(found.by_key[KEY].prefill_s) == [0.1]
    assert found.problems == [
        f"{file}: 2 lines skipped; the first one is line 2: prefill_s is out of bounds"
    ]


def test_without_a_directory_no_file_is_written():
    into = store(None)
    take(into, 0.1)

    assert dict(into.kept()) == {}


def test_full_disk_costs_only_samples(tmp_path: Path):
    (tmp_path / "samples").write_text("in the way")
    into = SampleStore(tmp_path / "samples", most=10)
    with capture_logs() as logs:
        take(into, 0.1)

    assert into.refused == {DISK: 1}
    assert [each["event"] for each in logs] == ["samples.lost"]
    (tmp_path / "samples").unlink()
    take(into, 0.2)
    assert list(kept(tmp_path / "samples").prefill_s) == [0.2]


def test_unreadable_file_does_not_prevent_the_start(tmp_path: Path):
    folder = tmp_path / directory_name(KEY)
    (folder / "latest.jsonl").mkdir(parents=True)
    with capture_logs() as logs:
        into = store(tmp_path)

    assert [each["event"] for each in logs] == ["samples.unreadable"]
    assert dict(into.kept()) == {}


async def test_invalid_message_is_rejected_and_valid_messages_are_stored(tmp_path: Path):
    state = EstimatorState(
        iteration_memory=100, request_memory=100, max_applications=1, samples=store(tmp_path)
    )
    handle = Dispatcher(HANDLERS, state).handle
    good = LooseDelivery(body=encode(sampled(plain(0.1))))
    # JSON has no NaN: it is encoded as null.
    bad = LooseDelivery(body=encode(sampled(plain(math.nan))))
    for delivery in (good, bad, good):
        await handle(delivery)

    assert good.settlements == [Settlement.ACK, Settlement.ACK]
    assert bad.settlements == [Settlement.REJECT]
    assert list(kept(tmp_path).prefill_s) == [0.1, 0.1]
