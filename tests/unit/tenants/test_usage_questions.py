"""Times and durations in questions about usage."""

import pytest

from shared.contracts.errors import ContractError
from shared.tenants.usage_questions import parse_duration, parse_time


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("24h", 1_000_000.0 - 86_400.0),
        ("0.5d", 1_000_000.0 - 43_200.0),
        ("1700000000", 1_700_000_000.0),
        ("2023-11-14", 1_699_920_000.0),
        ("2023-11-14T22:13:20+00:00", 1_700_000_000.0),
    ],
)
def test_a_time_is_a_date_a_number_or_a_duration_ago(text: str, at: float) -> None:
    """All forms give Unix seconds; a date is one in UTC."""
    assert at == parse_time(text, 1_000_000.0, param="since")


@pytest.mark.parametrize("text", ["yesterday", "", "-3", "5w"])
def test_another_text_is_refused_by_name(text: str) -> None:
    """The error names the parameter."""
    with pytest.raises(ContractError, match="since"):
        parse_time(text, 0.0, param="since")
    with pytest.raises(ContractError, match="overlap"):
        parse_duration(text, param="overlap")
