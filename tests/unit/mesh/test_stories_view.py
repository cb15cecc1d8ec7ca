"""`headway request show` and `headway requests` print what an estimator keeps, at 80 columns."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from cyclopts import CycloptsError

from services.estimator.stories.shelf import Shelf, ShelfSettings
from services.mesh.cli import MeshProgram, main
from services.mesh.spec import EMBEDDED_SEEN
from services.mesh.verbs import cli_stories
from shared.contracts.base import RequestId, TenantId
from shared.contracts.stories.questions import StoriesReported, StoriesRequested
from shared.contracts.stories.story import PulledRequest, Story
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from tests.clocks import NOW
from tests.unit.solver.stories.lives import A0, a_step, a_story

EVICTED = a_story(
    *(0.1, 9.0, 9.0, 2.0, 11.0),
    request_id=RequestId("r1"),
    lane="lane.2.tiny.high.3.w0",
    history=(a_step("evicted", 3.0, pulled=1.0, begun=1.0, why="the drain was over " * 6),),
)
IN_TIME = a_story(0.1, 0.2, 0.3, 0.4, 0.5, request_id=RequestId("[b]r2\x1b[2J"), attained=True)


@asynccontextmanager
async def no_broker(_name: str) -> AsyncIterator[None]:
    yield None


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Records of an estimator that answers all questions at `NOW` + 60 s."""
    kept = Shelf(ShelfSettings(), heard_since=NOW)
    for story in (EVICTED, IN_TIME):
        kept.ended(story, NOW + 20.0)

    async def ask(
        _broker: object, question: Callable[[str], StoriesRequested]
    ) -> StoriesReported | None:
        return kept.answer(question("answer.1"), NOW + 60.0)

    monkeypatch.setattr(cli_stories, "broker_factory", lambda _url: no_broker)
    monkeypatch.setattr(cli_stories, "ask_stories", ask)
    return kept


async def run(*given: str) -> int:
    function, bound, _ = MeshProgram().parsed([*given, "--amqp-url", "amqp://x"])
    code: int = await function(*bound.args, **bound.kwargs)
    return code


async def test_a_request_is_shown_with_its_cause_phases_and_steps(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
):
    assert await run("request", "show", "r1") == EXIT_OK
    out = capsys.readouterr().out

    assert "request r1 of acme: completed, late" in out
    assert "Its first token came" in out
    assert "importance high, due in" in out
    assert [line.split()[4] for line in out.splitlines() if " evicted " in line][:1] == ["evicted"]
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


async def test_a_request_is_shown_as_json(shelf: Shelf, capsys: pytest.CaptureFixture[str]):
    assert await run("request", "show", "r1", "--json") == EXIT_OK
    shown = json.loads(capsys.readouterr().out)

    assert (shown["id"], shown["late"], shown["cause"]) == ("r1", True, "engine")
    assert sum(each["duration_s"] for each in shown["phases"]) == pytest.approx(11.0)


async def test_late_requests_are_listed(shelf: Shelf, capsys: pytest.CaptureFixture[str]):
    assert await run("requests", "--late", "--since", str(NOW)) == EXIT_OK
    out = capsys.readouterr().out

    assert "r1  acme  interactive" in out
    assert "r2" not in out


@pytest.mark.parametrize("given", [["requests"], ["request", "show", "r1"]])
async def test_where_nothing_answers_the_error_says_where_an_embedded_mesh_is_seen(
    given: list[str],
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    async def no_answer(*_: object) -> None:
        return None

    monkeypatch.setattr(cli_stories, "ask_stories", no_answer)

    assert await run(*given) == EXIT_FAILED
    assert "is an estimator running" in (printed := capsys.readouterr().err)
    assert EMBEDDED_SEEN in printed


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["list"], "`headway requests` lists requests"),
        (["list", "r1"], "`headway requests` lists requests"),
        (["r1"], "did you mean `headway request show r1`?"),
    ],
)
def test_other_words_than_show_name_the_right_verb(
    given: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["request", *given]) == EXIT_USAGE
    assert hint in capsys.readouterr().err


async def test_ids_are_text_that_does_not_control_the_terminal(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
):
    await run("requests", "--since", str(NOW))

    assert "[b]r2?[2J  acme" in capsys.readouterr().out


async def test_listed_requests_are_one_json_list(shelf: Shelf, capsys: pytest.CaptureFixture[str]):
    await run("requests", "--json", "--since", str(NOW))

    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == ["[b]r2\x1b[2J", "r1"]


async def test_an_unknown_request_is_an_error(shelf: Shelf, capsys: pytest.CaptureFixture[str]):
    assert await run("request", "show", "r9") == EXIT_FAILED
    captured = capsys.readouterr()

    assert captured.out == ""
    assert "there is no record of request r9" in captured.err
    assert "kept for 3600 s" in captured.err


async def test_a_request_without_an_end_is_with_its_instance(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
):
    pulled = PulledRequest(tenant=TenantId("acme"), request_id=RequestId("r9"), at=NOW)
    shelf.pulled(pulled, A0)

    assert await run("request", "show", "r9") == EXIT_FAILED
    assert "request r9 has not ended: a0 pulled it at" in capsys.readouterr().err


async def test_an_id_of_several_tenants_needs_a_tenant(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
):
    other: Story = msgspec.structs.replace(EVICTED, tenant=TenantId("other"))
    shelf.ended(other, NOW + 20.0)

    assert await run("request", "show", "r1") == EXIT_FAILED
    assert "use --tenant (other, acme)" in capsys.readouterr().err
    assert await run("request", "show", "r1", "--tenant", "other") == EXIT_OK
    assert "request r1 of other" in capsys.readouterr().out


async def test_without_an_estimator_there_is_an_error(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def silent(_broker: object, _question: object) -> None:
        return None

    monkeypatch.setattr(cli_stories, "ask_stories", silent)

    assert await run("request", "show", "r1") == EXIT_FAILED
    assert await run("requests") == EXIT_FAILED
    assert capsys.readouterr().err.count("is an estimator running") == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--limit", "0"), "--limit: 0 is below 1"),
        (("--limit", "1001"), "--limit: 1001 is above 1000"),
        (("--since", "soon"), "--since: the value is 'soon'; it must be Unix seconds, a date"),
    ],
)
async def test_values_out_of_range_are_refused(shelf: Shelf, given: tuple[str, str], says: str):
    with pytest.raises(CycloptsError, match=says):
        await run("requests", *given)
