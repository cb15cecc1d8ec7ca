"""Entry points of installed packages: what is found, and what the errors name."""

from pathlib import Path
from typing import Protocol

import pytest

from shared.contracts.errors import SettingsError
from shared.runtime import extensions
from tests.unit.runtime.packages import Install, installer

GROUP = "headway.test"


class Greeting(Protocol):
    def greet(self) -> str: ...
    def leave(self) -> None: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch)


def test_names_are_those_of_all_packages(install: Install) -> None:
    assert extensions.names(GROUP) == ()
    install(GROUP, "b", "none:b")
    install(GROUP, "a", "none:a")

    assert extensions.names(GROUP) == ("a", "b")


def test_object_is_made_and_checked(install: Install) -> None:
    code = "class Polite:\n def __init__(self, name): self.name = name\n"
    install(GROUP, "polite", "polite_a:Polite", f"{code} def greet(self): 0\n def leave(self): 0\n")
    install(GROUP, "rude", "polite_b:Polite", f"{code} def greet(self): 0\n")

    assert extensions.make(GROUP, "polite", Greeting, "x").name == "x"
    with pytest.raises(SettingsError) as refused:
        extensions.make(GROUP, "rude", Greeting, "x")
    assert str(refused.value) == (
        "headway.test 'rude' (polite_b:Polite, of package-1) returns Polite, which does not fit "
        "Greeting: it lacks leave"
    )


def test_object_that_cannot_be_called_is_refused(install: Install) -> None:
    install(GROUP, "number", "number_c:value", "value = 3\n")

    with pytest.raises(SettingsError, match=r"'number' .* is not callable: 3"):
        extensions.make(GROUP, "number", Greeting)


@pytest.mark.parametrize(
    ("value", "code", "reason"),
    [
        ("absent_module:value", "", "No module named 'absent_module'"),
        ("empty_d:value", "other = 3\n", "has no attribute 'value'"),
        ("broken_e:value", "raise ValueError('no licence')\n", "no licence"),
    ],
)
def test_error_of_an_import_names_the_package(
    install: Install, value: str, code: str, reason: str
) -> None:
    install(GROUP, "bad", value, code)

    with pytest.raises(SettingsError, match=f"{value}, of package-0.*{reason}"):
        extensions.load(GROUP, "bad")


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install(GROUP, "same", "first_f:value", "value = 1\n")
    install(GROUP, "same", "second_f:value", "value = 2\n")

    with pytest.raises(SettingsError, match="package-0 and package-1 both have 'same'"):
        extensions.load(GROUP, "same")


def test_objects_of_a_group_have_one_type(install: Install) -> None:
    install(GROUP, "one", "one_g:value", "value = 1\n")

    assert extensions.load_all(GROUP, int) == {"one": 1}
    with pytest.raises(SettingsError, match=r"'one' .* must be of type str: 1"):
        extensions.load_all(GROUP, str)
