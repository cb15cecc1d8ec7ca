"""Policies and engine backends of installed packages, in settings."""

from pathlib import Path

import msgspec
import pytest

from services.agent.backends.policies import SchedulingSettings, create_policy
from services.agent.backends.registry import backend_names, create_backend
from services.agent.backends.settings import EngineSettings, SimulatedSettings, VllmSettings
from services.agent.service import check
from services.agent.settings import Settings
from shared.contracts.errors import SettingsError
from shared.runtime.clock import SystemClock
from solver.scheduling.engine.latency import LatencyTable
from tests.unit.runtime.packages import Install, installer

TABLE = LatencyTable(tokens_s=(0.0, 1.0))
POLICY = "class Policy:\n def __init__(self, latency): self.latency = latency\n"
METHODS = "".join(f" def {name}(self, *_): 0\n" for name in ("add", "remove", "observe", "decide"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch)


@pytest.mark.parametrize("settings", [SimulatedSettings, VllmSettings])
def test_policy_of_a_package_is_accepted_where_it_is_installed(
    install: Install, settings: type[msgspec.Struct]
) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"policy 'mine' does not exist; .*qoserve"):
        msgspec.convert({"policy": "mine"}, settings)
    install("headway.policies", "mine", "policy_h:Policy", POLICY + METHODS)
    msgspec.convert({"policy": "mine"}, settings)
    made = create_policy("mine", TABLE, SchedulingSettings())

    assert made.latency is TABLE  # type: ignore[attr-defined]


def test_names_of_our_own_policies_are_not_replaced(install: Install) -> None:
    install("headway.policies", "fcfs", "policy_i:Policy", POLICY + METHODS)

    assert type(create_policy("fcfs", TABLE, SchedulingSettings())).__name__ == "FixedChunkFcfs"


def test_policy_without_a_method_is_refused_by_name(install: Install) -> None:
    install("headway.policies", "half", "policy_j:Policy", POLICY)

    with pytest.raises(
        SettingsError, match="does not fit SchedulingPolicy: it lacks add, remove, observe, decide"
    ):
        create_policy("half", TABLE, SchedulingSettings())


def test_agent_refuses_such_a_policy_before_it_starts(install: Install) -> None:
    install("headway.policies", "part", "policy_m:Policy", POLICY)
    engine = EngineSettings(simulated=SimulatedSettings(policy="part"))
    check(Settings(instance_id="i"))

    with pytest.raises(SettingsError, match=r"'part' .* does not fit SchedulingPolicy"):
        check(Settings(instance_id="i", engine=engine))


def test_backend_of_a_package_gets_entries_and_options(install: Install) -> None:
    code = (
        "from services.agent.backends.simulated.backend import SimulatedEngine\n"
        "from services.agent.backends.settings import SimulatedSettings\n"
        "def make(entries, options, clock):\n"
        "    engine = SimulatedEngine(entries, SimulatedSettings(), clock)\n"
        "    engine.options = options\n"
        "    return engine\n"
    )
    install("headway.engines", "mine", "engine_k:make", code)
    settings = EngineSettings(backend="mine", options={"port": "1"})
    engine = create_backend("mine", (), settings, SystemClock())

    assert engine.options == {"port": "1"}  # type: ignore[attr-defined]
    assert backend_names() == ["mine", "remote", "simulated", "vllm"]


def test_backend_without_a_method_is_refused_by_name(install: Install) -> None:
    install("headway.engines", "half", "engine_l:make", "def make(*_):\n    return object()\n")

    with pytest.raises(SettingsError, match="does not fit EngineBackend: it lacks identity"):
        create_backend("half", (), EngineSettings(), SystemClock())
