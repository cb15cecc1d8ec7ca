"""Types of the options of `headway profile`."""

from cyclopts import Parameter

from shared.runtime.options import read_by


def integers(*, least: int) -> Parameter:
    """Option with integers of at least *least*, separated by commas."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not a list of integers N,N,...") from None
        if min(numbers) < least:
            raise ValueError(f"{text!r}: each value must be at least {least}")
        return numbers

    return read_by(
        read,
        metavar="N,N,...",
        show_default=lambda numbers: ",".join(map(str, numbers)),
    )
