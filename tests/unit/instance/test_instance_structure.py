"""Where phases are written, and what the shell never reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STREAMS = {"answer.py", "call_answer.py"}
PLANS = {"segments", "plan", "rank", "rank_of", "Rank", "following"}
DEADLINES = {
    "deadline_at",
    "token_deadline_at",
    "first_token_deadline_at",
    "completion_deadline_at",
    "planning_deadline_at",
}


def named(path: Path) -> Iterator[str]:
    """Names and attributes that a module reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def test_one_module_assigns_phases():
    writers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "solver/instance").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "phase"
    }

    assert writers == {"solver/instance/request.py"}


def test_the_shell_reads_neither_plans_nor_ranks_nor_deadlines():
    for path in (ROOT / "services/agent").glob("*.py"):
        names = set(named(path))
        assert names.isdisjoint(PLANS), path.name
        if path.name not in STREAMS:
            assert names.isdisjoint(DEADLINES), path.name
