"""Check of prefill-time samples before they are used for training."""

from collections.abc import Sequence

from solver.prediction.prefill.features import FEATURES

TIME = "prefill_s"
"""Result of `fault_of` for a sample with valid features and an invalid time."""

_MOST_TOKENS = 1e8
_MOST_SEQUENCES = 1e6
_BOUNDS: dict[str, tuple[float, float]] = {
    "prompt_tokens": (0.0, _MOST_TOKENS),
    "max_tokens": (0.0, _MOST_TOKENS),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "is_interactive": (0.0, 1.0),
    "is_streaming": (0.0, 1.0),
    "cached_tokens": (0.0, _MOST_TOKENS),
    "locality": (0.0, 2.0),
    "running": (0.0, _MOST_SEQUENCES),
    "prefill_backlog_tokens": (0.0, 1e9),
    "kv_utilization": (0.0, 2.0),
}
"""Minimum and maximum of each feature on a working engine."""
_BOUNDS_OF_COLUMNS = tuple(_BOUNDS[name] for name in FEATURES)
_MOST_S = 3600.0


def fault_of(features: Sequence[float], prefill_s: float) -> str | None:
    """
    Return the field that makes a sample invalid; None for a valid sample.

    Args:
        features: Columns as in `FEATURES`.
        prefill_s: Time from first scheduled to first token; 0 if the engine does not report it.

    Returns:
        The name of the first invalid feature, `features` if their number is wrong, or `TIME`. NaN
        is out of all bounds.
    """
    if len(features) != len(FEATURES):
        return "features"
    for name, value, (least, most) in zip(FEATURES, features, _BOUNDS_OF_COLUMNS, strict=True):
        if not least <= value <= most:
            return name
    return None if 0.0 < prefill_s <= _MOST_S else TIME
