"""Lists of operations in ops/docs/lso.md are complete and correct."""

from msgspec.structs import fields

from services.agent.settings import LsoSettings
from services.agent.verbs.cli_lso import LSO
from shared.contracts.control import LsoOutcome
from shared.contracts.telemetry import Capability
from solver.planning.lso.operations import Lso
from tests.unit.ops.deployment import ROOT, verbs_below
from tests.unit.ops.doc_tables import names, table

PAGE = ROOT / "ops/docs/lso.md"


def test_operations_are_listed():
    here = (
        kind for kind in Lso.__subclasses__() if kind.__module__ == "solver.planning.lso.operations"
    )
    kinds = list(dict.fromkeys(kind.kind for kind in here))

    assert [row[0].strip("`") for row in table(PAGE, "operation | what it does")] == kinds


def test_settings_are_listed_with_their_defaults():
    documented = {row[0].strip("`"): row[1] for row in table(PAGE, "lso")}

    assert documented == {field.name: str(field.default) for field in fields(LsoSettings)}


def test_outcomes_are_listed():
    assert names(PAGE, "outcome") == [outcome.value for outcome in LsoOutcome]


def test_capabilities_exist():
    listed = {row[1].strip("`") for row in table(PAGE, "operation | capability")}

    assert listed <= {capability.value for capability in Capability}


def test_verbs_are_named():
    text = PAGE.read_text()

    assert [verb for verb in verbs_below(LSO) if f"`{verb}`" not in text] == []
