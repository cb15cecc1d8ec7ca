"""How help is printed: aligned columns without boxes, at any width and without colour."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is loaded where help is printed
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

LABEL_SHARE = 0.4
"""Share of the width that names of options use at most."""


class HelpLayout:
    """Layout of the help that cyclopts composes."""

    def render_usage(
        self,
        console: "Console",
        options: "ConsoleOptions",  # noqa: ARG002 - of the protocol
        usage: Any,
    ) -> None:
        """Print the line of usage."""
        _print(console, f"usage: {str(usage).removeprefix('Usage: ').strip()}\n")

    def render_description(
        self,
        console: "Console",
        options: "ConsoleOptions",  # noqa: ARG002 - of the protocol
        description: Any,
    ) -> None:
        """Print what a verb does; lines of a paragraph are joined, unless one is indented."""
        for paragraph in _text(console, description).split("\n\n") if description else ():
            is_table = any(line.startswith(" ") for line in paragraph.splitlines())
            _print(console, f"{paragraph if is_table else _joined(paragraph)}\n")

    def __call__(
        self,
        console: "Console",
        options: "ConsoleOptions",  # noqa: ARG002 - of the protocol
        panel: "HelpPanel",
    ) -> None:
        """Print a group of verbs or options."""
        from cyclopts.help.specs import DescriptionRenderer  # noqa: PLC0415 - loads rich
        from rich.padding import Padding  # noqa: PLC0415 - as above
        from rich.table import Table  # noqa: PLC0415 - as above
        from rich.text import Text  # noqa: PLC0415 - as above

        describe = DescriptionRenderer()
        table = Table.grid(padding=(0, 2))
        table.add_column(max_width=int(console.width * LABEL_SHARE), overflow="fold")
        table.add_column()
        for entry in panel.entries:
            label = ", ".join(entry.display_labels_with_metavar)
            table.add_row(Text(label), Text(_joined(_text(console, describe(entry)))))
        if panel.entries:
            _print(console, f"{panel.title}:".lower())
            _print(console, Padding(table, (0, 0, 1, 2), expand=False))


LAYOUT = HelpLayout()


def shown_default(value: Any) -> str | None:
    """Text of an option's default in its help; None for one that says nothing."""
    if value is None or isinstance(value, bool) or value in ("", (), []):
        return None
    if isinstance(value, tuple | list):
        return ", ".join(str(getattr(each, "value", each)) for each in value)
    return str(value)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _text(console: "Console", content: Any) -> str:
    """Text of *content*, with the line breaks that it has itself."""
    with console.capture() as captured:
        console.print(content, soft_wrap=True)
    return captured.get().strip("\n")


def _print(console: "Console", content: Any) -> None:
    """Print *content* without the spaces that fill its lines."""
    with console.capture() as captured:
        console.print(content, markup=False, highlight=False)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), markup=False, highlight=False)
