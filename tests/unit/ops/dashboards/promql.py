"""
Names in PromQL expressions: selected series with their labels, and labels of the results.

Whether an expression is valid is promtool's to say; this module only finds names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
    \s+ | \#[^\n]*
    | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<range>\[[^\]]*\])
    | (?P<number>\d[\w.]*)
    | (?P<name>[A-Za-z_:][\w:]*)
    | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^=<>(){},@])
    """,
    re.VERBOSE,
)
_LABEL_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})
_MATCHERS = frozenset({"=", "!=", "=~", "!~"})


@dataclass(slots=True)
class Names:
    """Names that an expression uses."""

    selected: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    """Each selector: name of the series, and labels of its matchers."""
    listed: set[str] = field(default_factory=set)
    """Labels in lists: of aggregations, and of matchings of two vectors."""
    kept: set[str] = field(default_factory=set)
    """Labels in lists that the result may have: those of `by`, `on` and `group_left`."""

    @property
    def series(self) -> set[str]:
        return {name for name, _ in self.selected}


def tokens(expression: str) -> Iterator[str]:
    """
    Names, signs and texts of *expression*; ranges, numbers and comments are left out.

    Raises:
        ValueError: A part of the expression is none of these.
    """
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"unknown PromQL at {expression[at : at + 20]!r}")
        at = match.end()
        if match.lastgroup in ("text", "name", "sign"):
            yield match.group()


def names_in(expression: str) -> Names:
    """
    Names in *expression*.

    Raises:
        ValueError: A selector has no name, or the expression has unknown parts.
    """
    found, words = Names(), [*tokens(expression), "", ""]
    at = 0
    while at < len(words) - 2:
        word, following = words[at], words[at + 1]
        at += 1
        if word == "{":
            raise ValueError(f"a selector without a name in {expression!r}")
        if not re.match(r"[A-Za-z_:]", word) or word in _WORDS:
            continue
        if word in _LABEL_LISTS:
            if following == "(":
                end = words.index(")", at)
                labels = set(words[at + 1 : end]) - {","}
                found.listed |= labels
                if word in ("by", "on", "group_left"):
                    found.kept |= labels
                at = end + 1
        elif following == "{":
            end = words.index("}", at)
            labels = {
                label
                for label, sign in zip(words[at + 1 : end], words[at + 2 : end], strict=False)
                if sign in _MATCHERS
            }
            found.selected.append((word, frozenset(labels)))
            at = end + 1
        elif following not in ("(", "by", "without"):  # else a function or an aggregation
            found.selected.append((word, frozenset()))
    return found
