"""Parses parameters of requests about stored objects."""

from shared.contracts.errors import ContractError


def whole_number(name: str, text: str, *, low: int, high: int) -> int:
    """
    Parse the whole number from *low* to *high* in the parameter *name*.

    Raises:
        ContractError: The text is something else, or out of range; `param` is *name*.
    """
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ContractError(f"{name} must be a whole number from {low} to {high}", param=name)
    return value
