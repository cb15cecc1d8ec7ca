"""The live view of the mesh as text."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO

import pytest
from rich.console import Console

from services.mesh.spec import EMBEDDED_SEEN
from services.mesh.top import NONE_FINISHED, View
from services.mesh.verbs import cli_watch
from shared.contracts.base import InstanceId, ModelName, RequestId, TenantId
from shared.contracts.errors import MeshError
from shared.contracts.plans import PlanPublished, VirtualQueue
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import InstanceStatus, InstanceTotals, RequestObserved
from tests.clocks import NOW

URL = "amqp://me:secret@broker:5672/"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def test_the_share_that_the_plan_expects_late_is_shown():
    view = View()
    assert "expected late" not in text_of(view)

    queue = VirtualQueue(instance_id=InstanceId("i"), segments=())
    view.on_message(
        PlanPublished(
            epoch=1, issued_at=NOW, leader_id="l", queue=queue, policy="qlm", expected_late=0.25
        )
    )

    assert "25.0% of the weight is expected late" in text_of(view)
    assert view.data()["expected_late"] == 0.25


def text_of(view: View) -> str:
    out = StringIO()
    Console(file=out, width=120, no_color=True).print(*view.tables(folded=True))
    return out.getvalue()


@pytest.mark.parametrize("columns", [80, 120])
def test_all_figures_fit_a_terminal_without_colour(columns: int):
    view = View()
    for number in range(2):
        view.on_message(
            InstanceStatus(
                instance_id=InstanceId(f"inference-pool-7f9c6d-{number}"),
                incarnation="i", seq=1, at=NOW, engine="vllm-0.32.0", device="NVIDIA H100",
                model=ModelName(MODEL), running=12, max_running=64, waiting=3, backlog_s=1.25,
                kv_utilization=0.4, plan_epoch=1234,
                totals=InstanceTotals(completed=123456, evicted=31, swaps=7),
            )
        )  # fmt: skip
    out = StringIO()
    Console(file=out, width=columns, no_color=True).print(*view.tables(folded=True))
    text = out.getvalue()

    assert max(map(len, text.splitlines())) <= columns
    (first, *_) = [line for line in text.splitlines() if "12/64" in line]
    assert first.split()[-8:] == ["12/64", "3", "1.2", "40%", "123456", "31", "7", "1234"]
    names = "".join(line[: first.index("meta")].strip() for line in text.splitlines())
    assert "inference-pool-7f9c6d-0" in names
    assert NONE_FINISHED in text
    assert "last 0 requests" not in text


def test_classes_have_the_quantiles_of_times_to_first_tokens_if_there_are_any():
    view = View()
    first_tokens = [
        (QosClass.INTERACTIVE, NOW + 0.75),
        (QosClass.INTERACTIVE, NOW + 0.25),
        (QosClass.BEST_EFFORT, 0.0),
    ]
    for qos_class, first_token_at in first_tokens:
        view.on_message(
            RequestObserved(
                request_id=RequestId("r"), instance_id=InstanceId("a"), model=ModelName(MODEL),
                engine="e", device="d", application="*", tenant=TenantId("t"),
                qos_class=qos_class, prompt_tokens=1, output_tokens=0, arrived_at=NOW,
                pulled_at=NOW, submitted_at=NOW, first_token_at=first_token_at,
                finished_at=NOW + 1.0, attained=True,
            )
        )  # fmt: skip
    out = StringIO()
    Console(file=out, width=80, no_color=True).print(*view.tables(folded=True))
    lines = [line for line in out.getvalue().splitlines() if "100.0%" in line]
    rows = [line.replace("│", " ").split() for line in lines]

    assert sorted(rows) == [
        ["best_effort", "1", "100.0%", "-", "-"],
        ["interactive", "2", "100.0%", "0.250", "0.750"],
    ]


@pytest.mark.parametrize("given", [{"once": True}, {"json": True}])
async def test_where_no_instance_reports_the_error_says_what_to_do(
    given: dict[str, bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    @asynccontextmanager
    async def no_broker(_name: str) -> AsyncIterator[None]:
        yield None

    async def nothing(*_: object, **__: object) -> object:
        return View()

    monkeypatch.setattr(cli_watch, "broker_factory", lambda _url: no_broker)
    monkeypatch.setattr(cli_watch, "declare_topology", nothing)
    monkeypatch.setattr(cli_watch, "watch", nothing)
    with pytest.raises(MeshError) as raised:
        await cli_watch.top(amqp_url=URL, **given)

    assert "no instance reports at amqp://***@broker:5672/" in str(raised.value)
    assert str(raised.value).endswith(EMBEDDED_SEEN)
    assert "instance " not in capsys.readouterr().out
