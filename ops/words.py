"""
List of words that are hard to understand in technical text, and a check that finds them.

`python -m ops.words` prints each place with a suggestion. The check includes identifiers, whose
words are separated by `_` or camel case. `ALLOWED` lists quotations and correct uses.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUGGESTIONS = {
    r"tell|tells|told|telling|teller": "publish, report, return, log, notify, distinguish",
    r"foretell|foretells|foretold|foresee|foresees|foresaw|foreseen|foreseeing": (
        "predict, forecast, preview"
    ),
    r"nobody|somebody|anybody|everybody|whoever|whosoever": (
        "the caller, client, operator, instance, consumer"
    ),
    r"who|whom": "that, which, or the name of the process",
    r"anew": "again",
    r"bygone": "retired, previous",
    r"likewise": "also, in the same way",
    r"for ever|forevermore": "without limit, until ...",
    r"(?:go|goes|going|went|gone) on": "continue, resume",
    r"(?:stand|stands|stood|standing) still": "stall",
    r"(?<!there )(?<!there, )is no (?!longer|more|less|fewer|later|earlier|other)\w+": (
        "is not a ...; has no ..."
    ),
    r", too(?=[.,;:)\"'`]|$)": "also, before the verb",
    r"(?:\"\"\"|# )Of\b(?! course)": "a noun phrase or a sentence",
    r"(?:\"\"\"|# |\| )That it\b": "a noun phrase or a sentence",
    r"hopeless|hopelessness": "infeasible",
    r"fillers?": "best-effort work; best-effort and relegated work",
    r"obituary|obituaries|buried": "dead-letter reply, dead-lettered",
    r"at the door": "before admission, in the global queue",
}
"""Pattern of a word, to which the check adds word boundaries -> suggested words."""

ALLOWED: tuple[tuple[str, str], ...] = (
    ("CHANGELOG.md", "| queue `headway.obituaries` |"),
    ("shared/broker/declaring.py", 'EARLIER_QUEUE = "headway.obituaries"'),
    ("CHANGELOG.md", "| message fields `foretold`;"),
    ("tests/contract/messages/test_golden_messages.py", 'assert "foretold" in json.loads(body)'),
    ("tests/contract/messages/earlier/request.queued.v1.0-1-0.json", '"foretold"'),
)
"""Pairs (path, part of the line) of quotations and correct uses of listed words; at most 30."""

_SCANNED = (".py", ".md", ".toml", ".yml", ".yaml", ".json", ".conf", ".sh", "Makefile", "run")
_NOT_SCANNED = ("ops/words.py", "tests/unit/ops/test_words.py")
_RULES = tuple(
    (
        re.compile(
            pattern if pattern.startswith((",", '(?:\\"')) else rf"\b(?:{pattern})\b",
            re.IGNORECASE,
        ),
        suggestion,
    )
    for pattern, suggestion in SUGGESTIONS.items()
)


class Finding(NamedTuple):
    """One listed word in one line of a file."""

    path: str
    line: int
    text: str
    word: str
    suggestion: str


def words_of(line: str) -> str:
    """The text of *line*, with its identifiers split into words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"(?<=\w)_|_(?=\w)", " ", line))


def findings_in(path: str, text: str) -> Iterator[Finding]:
    """Listed words in *text*, except in allowed places."""
    allowed = [part for place, part in ALLOWED if place == path]
    for number, line in enumerate(text.splitlines(), start=1):
        if any(part in line for part in allowed):
            continue
        words = words_of(line)
        for rule, suggestion in _RULES:
            for match in rule.finditer(words):
                yield Finding(path, number, line.strip(), match.group(), suggestion)


def tracked_files(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Path and text of each file that the check covers."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        path = root / name
        if name.endswith(_SCANNED) and name not in _NOT_SCANNED and path.is_file():
            yield name, path.read_text()


def main(arguments: list[str]) -> int:
    """Print findings in this checkout or the checkout at *arguments*; return 1 if there are any."""
    root = Path(arguments[0]) if arguments else ROOT
    found = [each for path, text in tracked_files(root) for each in findings_in(path, text)]
    for each in found:
        print(f"{each.path}:{each.line}: {each.word!r}: {each.suggestion}\n    {each.text}")
    print(f"words: {len(found)} to replace, {len(ALLOWED)} allowed")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
