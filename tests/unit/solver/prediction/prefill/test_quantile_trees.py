"""Encoding of trees for routers: trees are decoded unchanged, or an error states the reason."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.contracts.errors import ContractError, SchemaMismatchError
from solver.prediction.prefill.features import FEATURES, InstanceFeatures, RequestFeatures
from solver.prediction.prefill.features import feature_matrix as matrix
from solver.prediction.prefill.quantile_trees import QuantileTrees, decode, encode
from solver.prediction.prefill.tree_walk import Forest


def stumps(**changes: Any) -> QuantileTrees:
    """Trees with median 1 s, mean 1.5 s and 0.9 quantile 2 s (8 s above 1000 prompt tokens)."""
    leaves = [0.0, np.log(2), np.log(8), 0.5]
    forest = Forest(
        starts=np.array([0, 1, 2, 3], dtype=np.uint32),
        roots=np.array([0, 1, 4], dtype=np.uint32),
        depths=np.array([0, 1, 0], dtype=np.uint32),
        split=np.zeros(5, dtype=np.uint32),
        child=np.array([0, 2, 2, 3, 4], dtype=np.uint32),
        value=np.array([leaves[0], 1000.0, *leaves[1:]]),
    )
    trees = QuantileTrees(
        schema_version=1,
        features=FEATURES,
        levels=(0.5, 0.9),
        scale=np.array([1.0, 0, 0, 0, 0]),
        baselines=np.array([0.0, 0.0, 1.0]),
        forest=forest,
    )
    return msgspec.structs.replace(trees, **changes)


def of_prompt(tokens: int) -> np.ndarray:
    return matrix(RequestFeatures(prompt_tokens=tokens, max_tokens=1), [InstanceFeatures()])


@pytest.mark.parametrize(("prompt", "expected_s"), [(1000, 2.0), (1001, 8.0)])
def test_a_tree_goes_right_above_its_threshold(prompt: int, expected_s: float):
    prediction = stumps().predict(of_prompt(prompt))

    assert prediction.quantiles_s[0].tolist() == pytest.approx([1.0, expected_s])
    assert prediction.mean_s.tolist() == pytest.approx([1.5])


def test_crossing_quantiles_are_put_in_order():
    crossed = stumps(baselines=np.array([1.0, 0.0, 1.0]))

    assert crossed.predict(of_prompt(9)).quantiles_s[0].tolist() == pytest.approx([np.e, np.e])


def test_means_are_never_negative():
    low = stumps(baselines=np.array([0.0, 0.0, -9.0]))

    assert low.predict(of_prompt(9)).mean_s.tolist() == [0.0]


def test_a_prediction_can_be_split_by_candidate():
    prediction = stumps().predict(np.concatenate([of_prompt(9), of_prompt(2000)]))

    assert prediction.of(1).quantiles_s.tolist() == [prediction.quantiles_s[1].tolist()]
    assert prediction.of(1).mean_s.tolist() == [prediction.mean_s[1]]


def test_columns_are_found_by_level():
    assert stumps().column_of(0.9) == 1
    with pytest.raises(ValueError, match=r"no trees for level 0.95; levels.*: \(0.5, 0.9\)"):
        stumps().column_of(0.95)


def test_encoded_trees_are_decoded_unchanged():
    body = encode(stumps())

    assert encode(decode(body)) == body
    assert decode(body).predict(of_prompt(2000)).quantiles_s[0].tolist() == pytest.approx(
        [1.0, 8.0]
    )


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"schema_version": 7}, "schema_version", "schema_version is 7; expected 1"),
        ({"features": FEATURES[1:]}, "features", r"features is \('max_tokens', .*; expected "),
    ],
)
def test_trees_of_another_schema_are_rejected(changes: dict[str, Any], field: str, message: str):
    with pytest.raises(SchemaMismatchError, match=message) as refused:
        decode(encode(stumps(**changes)))

    assert refused.value.field == field


def changed(**arrays: list[float]) -> Callable[[], bytes]:
    def body() -> bytes:
        forest = stumps().forest
        values = {k: np.array(v, dtype=getattr(forest, k).dtype) for k, v in arrays.items()}
        return encode(stumps(forest=forest._replace(**values)))

    return body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: b"{", "not valid quantile trees"),
        (lambda: b"\xff", "not valid quantile trees"),
        (lambda: encode(stumps()).replace(b"1000.0", b"null"), "finite numbers"),
        (lambda: encode(stumps()).replace(b"1000.0", b"[3]"), "list of numbers"),
        (lambda: encode(stumps()).replace(b"[0,2,2,3,4]", b"[0,-2,2,3,4]"), "list of numbers"),
        (lambda: encode(stumps()).replace(b"[0,2,2,3,4]", b"7"), "list of numbers"),
        (lambda: encode(stumps(levels=(0.9, 0.5))), "levels"),
        (lambda: encode(stumps(scale=np.ones(4))), "scale"),
        (lambda: encode(stumps(baselines=np.ones(2))), "baselines"),
        (changed(starts=[0, 2, 1, 3]), "starts"),
        (changed(starts=[0, 1, 2]), "starts"),
        (changed(roots=[0, 1, 5]), "roots"),
        (changed(depths=[0, 1]), "depths"),
        (changed(split=[0, 11, 0, 0, 0]), "split"),
        (changed(child=[0, 0, 2, 3, 4]), "child"),
        (changed(child=[0, 2, 2, 3, 5]), "child"),
        (changed(child=[0, 4, 2, 3, 4]), "child"),
        (changed(value=[0.0]), "value"),
    ],
)
def test_invalid_trees_are_rejected(body: Callable[[], bytes], message: str):
    with pytest.raises(ContractError, match=message):
        decode(body())
