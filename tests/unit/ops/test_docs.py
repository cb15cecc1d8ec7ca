"""Statements of the documents about the code are true."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from services.mesh.arguments import parser
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.lanes import LaneLayout, relegated_name
from solver.planning.lanes import all_lanes
from tests.unit.ops.deployment import CLIS, ROOT, SHARED_VERBS

DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "ops/docs").rglob("*.md")])
each = pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
NOT_FOR_PRODUCERS = {"duplicate_request", "internal"}
"""Error codes that AMQP producers never get."""


DEFAULT_CODE = inspect.signature(ContractError).parameters["code"].default
LITESTARS = {"not_found", "method_not_allowed"}


def codes(text: str) -> set[str]:
    return set(re.findall(r'(?:code=|code = |INTERNAL_ERROR = )"([a-z_]+)"', text))


@each
def test_links_have_a_target(document: Path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


@each
def test_paths_exist(document: Path):
    roots = "ops|services|shared|solver|tests"
    paths = re.findall(rf"`((?:{roots})/[\w./-]+)`", document.read_text())

    assert [path for path in paths if not (ROOT / path).exists()] == []


@each
def test_commands_exist(document: Path):
    text = document.read_text()
    mesh = parser(amqp_url="", registry=None).format_help()
    mentioned = re.findall(r"headway-(gateway|planner|estimator|agent) ([a-z][a-z-]+)", text)
    verbs = {(s, v.name) for s, cli in CLIS.items() for v in (*cli.verbs, *cli.offline_verbs)}
    verbs |= {(service, verb) for service in CLIS for verb in SHARED_VERBS}

    assert set(mentioned) - verbs == set()
    lines = re.findall(r"^(?:\$ |\.venv/bin/)headway ([a-z-]+)", text, re.MULTILINE)
    assert [verb for verb in lines if f"  {verb} " not in mesh and f"  {verb}\n" not in mesh] == []


def test_symbols_of_the_changelog_exist():
    text = (ROOT / "CHANGELOG.md").read_text()
    missing = []
    for name in re.findall(r"`((?:services|shared|solver|ops)(?:\.\w+)+)`", text):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)

    assert missing == []


def test_documented_error_codes_are_exactly_the_existing_codes():
    sources = [
        p for folder in ("services", "shared", "solver") for p in (ROOT / folder).rglob("*.py")
    ]
    raised = {code for path in sources for code in codes(path.read_text())} | {DEFAULT_CODE}
    amqp = re.findall(
        r"^\| `([a-z_]+)` \| \d{3} \|", (ROOT / "ops/docs/producers.md").read_text(), re.MULTILINE
    )
    http = re.findall(
        r"^\| \d{3} \| ([^|]+) \|", (ROOT / "ops/docs/http.md").read_text(), re.MULTILINE
    )
    # Codes of lines are in the text about result files.
    batches = set(re.findall(r"`([a-z_]+)`", (ROOT / "ops/docs/batches.md").read_text())) & raised
    of_http = {code for cell in http for code in re.findall(r"`([a-z_]+)`", cell)}
    documented = {*amqp, *of_http, *batches}

    assert documented - LITESTARS == raised - NOT_FOR_PRODUCERS


def queues_of_a_model() -> int:
    """Lanes and companion queues."""
    model = ModelName("m")
    lanes = all_lanes((model,), LaneLayout())
    names = {n for key in lanes for n in (key.queue_name, key.overflow_name, key.resume_name)}
    return len({*names, relegated_name(model)})


def test_the_documented_number_of_queues_of_a_model_is_the_maximum():
    operations = (ROOT / "ops/docs/operations.md").read_text()
    reported = re.search(r"has up to (\d+) queues:", operations)

    assert reported is not None
    assert int(reported[1]) == queues_of_a_model()
    compose = (ROOT / "docker-compose.yml").read_text()
    assert f"a model has up to {queues_of_a_model()} queues." in compose
