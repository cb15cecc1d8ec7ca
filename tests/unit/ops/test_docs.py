"""Statements of the documents about the code are true."""

import inspect
import pkgutil
import re
import shlex
import shutil
from pathlib import Path

import pytest

from services.mesh.cli import MeshProgram
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.lanes import LaneLayout, relegated_name
from solver.planning.lanes import all_lanes
from tests.unit.ops.deployment import CLIS, ROOT, verbs_of

DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "ops/docs").rglob("*.md")])
each = pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
MEASURED_PROFILES = ("engine.json",)
"""Profiles that commands of the documents write."""
NOT_FOR_PRODUCERS = {"duplicate_request"}
"""Error codes that AMQP producers never get."""


DEFAULT_CODE = inspect.signature(ContractError).parameters["code"].default
OF_ROUTING = {"not_found", "method_not_allowed"}


def codes(text: str) -> set[str]:
    return set(re.findall(r'(?:code=|code = |INTERNAL_ERROR = |QUOTA_SPENT = )"([a-z_]+)"', text))


@each
def test_links_have_a_target(document: Path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


def anchors_of(document: Path) -> set[str]:
    """Anchors of the headings of *document*, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in headings)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in plain}


@each
def test_links_to_headings_have_a_target(document: Path):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    pages = [(document.parent / page if page else document, anchor) for page, anchor in links]

    assert [(page.name, a) for page, a in pages if a not in anchors_of(page)] == []


@each
def test_paths_exist(document: Path):
    roots = "ops|services|shared|solver|tests"
    paths = re.findall(rf"`((?:{roots})/[\w./-]+)`", document.read_text())

    assert [path for path in paths if not (ROOT / path).exists()] == []


@each
def test_commands_exist(document: Path):
    text = document.read_text()
    mentioned = re.findall(r"headway-(gateway|planner|estimator|agent) ([a-z][a-z-]+)", text)
    verbs = {(service, verb) for service, cli in CLIS.items() for verb in verbs_of(cli)}

    assert set(mentioned) - verbs == set()
    lines = re.findall(r"^(?:\$ |\.venv/bin/)headway ([a-z-]+)", text, re.MULTILINE)
    assert {*lines} - {*MeshProgram().app} == set()


def read(program: str, tokens: list[str]) -> None:
    """Parse a command line as *program* does, without running it."""
    if program == "headway" and tokens[0] != "plan":
        MeshProgram().parsed(tokens)
        return
    cli = CLIS[program.removeprefix("headway-") if "-" in program else "planner"]
    _, bound, _ = cli.app.meta.parse_args(tokens, print_error=False, exit_on_error=False)
    cli.parsed([*bound.args])


@each
def test_command_lines_are_accepted(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in MEASURED_PROFILES:
        shutil.copyfile(ROOT / "ops/sim/profiles/h100-llama3-8b.json", name)
    text = document.read_text().replace("\\\n", " ")
    lines = re.findall(
        r"^(?:\$ |\.venv/bin/)?(headway(?:-(?:gateway|planner|estimator|agent))?) "
        r"([a-z-]+(?: .*)?)$",
        text,
        re.MULTILINE,
    )
    for program, line in lines:
        tokens = shlex.split(re.split(r" [>|] ", line)[0], comments=True)
        if "..." not in tokens:
            read(program, tokens)


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

    assert documented - OF_ROUTING == raised - NOT_FOR_PRODUCERS


def queues_of_a_model() -> int:
    """Lanes and companion queues."""
    model = ModelName("m")
    lanes = all_lanes((model,), LaneLayout())
    names = {n for key in lanes for n in (key.queue_name, key.overflow_name, key.resume_name)}
    return len({*names, relegated_name(model)})


def test_the_documented_number_of_queues_of_a_model_is_the_maximum():
    runbooks = (ROOT / "ops/docs/runbooks.md").read_text()
    reported = re.search(r"has up to (\d+) queues:", runbooks)

    assert reported is not None
    assert int(reported[1]) == queues_of_a_model()
    compose = (ROOT / "docker-compose.yml").read_text()
    assert f"a model has up to {queues_of_a_model()} queues." in compose
