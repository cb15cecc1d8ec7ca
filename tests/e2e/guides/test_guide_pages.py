"""The guides say what a newcomer needs before, and leave nothing behind."""

import re

import pytest

from tests.e2e.guides.guide_blocks import GUIDES, NAMES, blocks_of, commands_of, page_of

each = pytest.mark.parametrize("name", NAMES)


def test_every_guide_is_listed():
    listed = set(re.findall(r"\]\(([\w-]+)\.md\)", (GUIDES / "README.md").read_text()))

    assert listed == set(NAMES)


@each
def test_the_text_names_each_file_before_its_content(name: str):
    """A page that is rendered does not show the titles of its blocks."""
    files = [block for block in blocks_of(page_of(name)) if block.file is not None]

    assert [block.file for block in files if f"`{block.file}`" not in block.before] == []


@each
def test_a_guide_says_how_long_it_takes(name: str):
    assert re.search(r"^The guide .*\bminutes\b", page_of(name), re.MULTILINE)


@each
def test_a_guide_ends_and_uninstalls_what_it_has_started(name: str):
    script = commands_of(page_of(name))
    exports, unset = (
        " ".join(re.findall(rf"^{command} (.*)$", script, re.MULTILINE))
        for command in ("export", "unset")
    )

    assert ("kill $(jobs -p)\nwait\n" in script) == ("&\n" in script)
    assert set(unset.split()) == set(re.findall(r"(?:^| )(\w+)=", exports))
    assert script.count("pip uninstall --yes") == script.count("pip install .")
