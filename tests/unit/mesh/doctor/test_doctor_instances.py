"""What the doctor concludes from the statuses of instances."""

from typing import Any

from services.mesh.doctor.findings import Finding, Level
from services.mesh.doctor.instances import on_instances
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.telemetry import (
    InstanceStatus,
    ModelState,
    RegistryState,
    Residency,
)
from tests.clocks import NOW

MODEL = ModelName("tiny-llama")


def a_status(name: str, **fields: Any) -> InstanceStatus:
    values: dict[str, Any] = {
        "instance_id": InstanceId(name),
        "incarnation": "1",
        "seq": 1,
        "at": NOW,
        "engine": "simulated",
        "device": "a100",
        "model": MODEL,
        "models": (ModelState(model=MODEL, residency=Residency.ACTIVE),),
        "registry": RegistryState(digest="d1"),
    }
    return InstanceStatus(**(values | fields))


def found(*statuses: InstanceStatus) -> list[Finding]:
    return list(on_instances(statuses))


def deviating(*statuses: InstanceStatus) -> list[str]:
    return [each.what for each in found(*statuses) if each.level is Level.DEVIATION]


def test_instances_are_counted_by_engine_and_device():
    (finding,) = found(a_status("a"), a_status("b"), a_status("c", engine="vllm"))

    assert finding.level is Level.OK
    assert finding.what == "2 simulated on a100, 1 vllm on a100; 3 take requests"


def test_no_instance_gives_no_finding():
    assert found() == []


def test_instances_that_take_no_requests_are_named_with_the_reason():
    findings = found(
        a_status("a", takes_in=False, draining=True),
        a_status("b", takes_in=False, activating=MODEL),
        a_status("c", takes_in=False),
    )
    notes = [each.what for each in findings if each.level is Level.NOTE]

    assert [name in what for name, what in zip("abc", notes, strict=True)] == [True] * 3
    assert "drains" in notes[0]
    assert "activates tiny-llama" in notes[1]


def test_instances_with_another_registry_are_named():
    other = RegistryState(digest="d2")
    whats = deviating(a_status("a"), a_status("b", registry=other), a_status("c"))

    assert len(whats) == 1
    assert whats[0].endswith("registry file than b")
    assert deviating(a_status("a"), a_status("b", registry=None)) == []


def test_pending_change_is_a_note_with_its_reason():
    pending = RegistryState(digest="d1", pending={"m": "no weights"})
    notes = [
        each.what for each in found(a_status("a", registry=pending)) if each.level is Level.NOTE
    ]

    assert notes == ["a: the change of m has no effect yet: no weights"]
