"""The check of words includes identifiers, allows quotations and prints places."""

import pytest

from ops import words


def found(line: str) -> list[str]:
    return [each.word for each in words.findings_in("a.py", line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# nobody listens", ["nobody"]),
        ("def test_it_is_told(): ...", ["told"]),
        ("class PrefillTeller:", ["Teller"]),
        ("self._foretold = 1", ["foretold"]),
        ('"""Of a request."""', ['"""Of']),
        ("# a hopeless case, too.", ["hopeless", ", too"]),
        ("the run goes on here", ["goes on"]),
        ("'x' is no number", ["is no number"]),
        ("there is no room", []),
        ("it is no longer here", []),
        ("of course, tools are too long", []),
    ],
)
def test_words_of_the_list_are_found(line: str, expected: list[str]):
    assert sorted(found(line)) == sorted(expected)


def test_lines_with_an_allowed_part_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(words, "ALLOWED", (("a.py", 'find("told")'),))

    assert found('find("told")') == []
    assert found("told") == ["told"]


def test_the_allow_list_is_short_and_in_use():
    assert len(words.ALLOWED) <= 30
    for path, part in words.ALLOWED:
        assert part in (words.ROOT / path).read_text()
