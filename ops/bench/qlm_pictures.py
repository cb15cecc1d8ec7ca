"""Pictures of QLM's figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from ops.bench.qlm_cells import MeshCell, MeshFigures
from ops.bench.qlm_tables import LABELS, value_of

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

_COLUMNS = 3


def draw_figures(
    found: MeshFigures, figures: Mapping[str, Sequence[MeshCell]], directory: Path
) -> Path:
    """Draw a panel for each of *figures* into one file; return its path."""
    drawn = [figure for figure in figures if figure in LABELS]
    rows = -(-len(drawn) // _COLUMNS)
    picture, panels = plt.subplots(
        rows, _COLUMNS, figsize=(5 * _COLUMNS, 3.6 * rows), layout="constrained", squeeze=False
    )
    for axes in panels.flat[len(drawn) :]:
        axes.set_visible(False)
    for figure, axes in zip(drawn, panels.flat, strict=False):
        _draw(axes, found, figure, figures[figure])
    file = directory / "figures.png"
    picture.savefig(file, dpi=110)
    plt.close(picture)
    return file


def _draw(axes: Axes, found: MeshFigures, figure: str, cells: Sequence[MeshCell]) -> None:
    label_name, label = LABELS[figure]
    value_name, key = value_of(figure)
    by_arm: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        by_arm.setdefault(cell.arm, []).append((label(cell), found[cell][key]))
    axes.set_title(f"figure {figure}")
    if all(len(points) == 1 for points in by_arm.values()):
        axes.barh(list(by_arm), [points[0][1] for points in by_arm.values()])
        axes.set_xlabel(value_name)
        return
    for arm, points in by_arm.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=arm)
    axes.set(xlabel=label_name, ylabel=value_name, ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
