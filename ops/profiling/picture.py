"""Plot of a profile: measured and predicted times."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ops.profiling.fit import Cell
from shared.contracts.errors import SettingsError


def check(file: Path) -> None:
    """
    Check that a plot can be written to *file*, since measuring takes long.

    Raises:
        SettingsError: matplotlib or the directory is missing, or the format is unknown.
    """
    plt = _pyplot()
    figure = plt.figure()
    known = figure.canvas.get_supported_filetypes()
    plt.close(figure)
    if file.suffix[1:].lower() not in known:
        raise SettingsError(
            f"--plot: {file.suffix or file.name!r} must be one of {', '.join(known)}"
        )
    if not file.parent.is_dir():
        raise SettingsError(f"--plot: {file.parent} is not a directory")


def draw(cells: Sequence[Cell], file: Path, *, title: str) -> None:
    """
    Write the plot to *file*, in the format of its suffix.

    Raises:
        SettingsError: matplotlib is missing, or the file cannot be written.
    """
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    for batch in sorted({each.num_decodes for each in cells}):
        own = [each for each in cells if each.num_decodes == batch]
        chunks = [each for each in own if each.chunk_tokens]
        tokens = [each.chunk_tokens for each in chunks]
        measured_ms = [1000 * each.measured_s for each in chunks]
        label = f"beside {batch} decodes" if batch else "alone"
        left.plot(tokens, measured_ms, "o", ms=3, label=label)
        right.plot(
            [1000 * each.predicted_s for each in own],
            [1000 * each.measured_s for each in own],
            "o",
            ms=3,
            label=label,
        )
    left.set(xlabel="tokens of a prompt in the iteration", ylabel="ms", xscale="log", yscale="log")
    most_ms = max(1000 * each.measured_s for each in cells)
    least_ms = min(1000 * each.measured_s for each in cells)
    right.plot([least_ms, most_ms], [least_ms, most_ms], "k-", lw=0.8)
    right.set(xlabel="predicted, ms", ylabel="measured, ms", xscale="log", yscale="log")
    left.legend(fontsize=8)
    try:
        figure.savefig(file)
    except OSError as error:
        raise SettingsError(f"--plot: cannot write {file}: {error}") from error
    finally:
        plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

        mpl.use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise SettingsError("--plot needs matplotlib: pip install matplotlib") from error
