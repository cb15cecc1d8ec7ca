"""The routers' features as a matrix."""

import numpy as np
import pytest

from solver.prediction.calibration.buckets import Bucket, Load, bucket_of
from solver.prediction.prefill.features import (
    FEATURES,
    InstanceFeatures,
    Locality,
    RequestFeatures,
    feature_matrix,
    locality_of,
)

REQUEST = RequestFeatures(
    prompt_tokens=1000, max_tokens=200, temperature=0.7, top_p=0.9, is_interactive=False
)


def test_each_candidate_has_a_row_and_each_feature_a_column():
    near = InstanceFeatures(
        cached_tokens=600, running=3, prefill_backlog_tokens=512, kv_utilization=0.25
    )
    matrix = feature_matrix(REQUEST, [InstanceFeatures(), near])

    assert dict(zip(FEATURES, matrix[1].tolist(), strict=True)) == {
        "prompt_tokens": 1000,
        "max_tokens": 200,
        "temperature": 0.7,
        "top_p": 0.9,
        "is_interactive": 0,
        "is_streaming": 1,
        "cached_tokens": 600,
        "locality": Locality.HIGH,
        "running": 3,
        "prefill_backlog_tokens": 512,
        "kv_utilization": 0.25,
    }
    assert np.flatnonzero(matrix[0] != matrix[1]).tolist() == [6, 7, 8, 9, 10]


def test_without_candidates_there_are_no_rows():
    assert feature_matrix(REQUEST, []).shape == (0, len(FEATURES))


@pytest.mark.parametrize(
    ("cached", "prompt", "expected"),
    [
        (0, 1000, Locality.NONE),
        (99, 1000, Locality.NONE),
        (100, 1000, Locality.PARTIAL),
        (499, 1000, Locality.PARTIAL),
        (500, 1000, Locality.HIGH),
        (1000, 1000, Locality.HIGH),
        (0, 0, Locality.NONE),
    ],
)
def test_locality_is_a_share_of_the_prompt(cached: int, prompt: int, expected: Locality):
    assert locality_of(cached, prompt) is expected


@pytest.mark.parametrize(
    ("prompt", "cached", "backlog", "expected"),
    [
        (100, 0, 0, Bucket(0, Locality.NONE, Load.LIGHT)),
        (512, 0, 1, Bucket(1, Locality.NONE, Load.SHARED)),
        (3000, 300, 4095, Bucket(2, Locality.PARTIAL, Load.SHARED)),
        (9000, 8000, 4096, Bucket(3, Locality.HIGH, Load.HEAVY)),
    ],
)
def test_buckets_are_by_prompt_size_locality_and_load(
    prompt: int, cached: int, backlog: int, expected: Bucket
):
    request = RequestFeatures(prompt_tokens=prompt, max_tokens=1)
    instance = InstanceFeatures(cached_tokens=cached, prefill_backlog_tokens=backlog)

    assert bucket_of(request, instance) == expected
