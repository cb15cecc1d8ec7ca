"""Files that engine cores share with the agent's process."""

from services.agent.backends.base import EngineLoad
from services.agent.backends.totals import CheckpointTotals, SchedulingTotals
from services.agent.backends.vllm.front.telemetry import EngineTelemetry
from services.agent.backends.vllm.shared.core_settings import CONFIG_KEY, refusal, refusal_reason
from services.agent.backends.vllm.shared.stats import StatsWriter
from shared.contracts.base import ModelName

MODELS = (ModelName("a"), ModelName("b"), ModelName("c"))


def additional_config(stats_path: str) -> dict[str, dict[str, object]]:
    """The part of a vLLM configuration from which a core derives its files."""
    latency = {"constant_s": 0.0, "linear_s": 0.0}
    return {
        CONFIG_KEY: {
            "stats_path": stats_path,
            "policy": "fcfs",
            "scheduling": {},
            "latency": latency,
            "grammar_timeout_s": 10.0,
        }
    }


def test_files_of_ended_engines_are_removed() -> None:
    telemetry = EngineTelemetry()
    for model in MODELS:
        telemetry.open(model)
    config = additional_config(str(telemetry.path(MODELS[0])))
    refusal(config, "not here")
    assert refusal_reason(config) == "not here"
    assert len(list(telemetry.directory().iterdir())) == 2 * len(MODELS) + 1
    telemetry.forget(MODELS)

    assert list(telemetry.directory().iterdir()) == []
    telemetry.close()


def test_reassigned_engine_keeps_its_files() -> None:
    telemetry = EngineTelemetry()
    donor, model, _ = MODELS
    telemetry.open(donor)
    telemetry.pass_on(donor, model)
    telemetry.forget((donor,))

    assert telemetry.path(model).exists()
    telemetry.close()


def test_host_may_have_removed_the_directory_first() -> None:
    """The engine host removes the directory at its end, before the agent is notified."""
    telemetry = EngineTelemetry()
    telemetry.open(MODELS[0])
    for path in telemetry.directory().iterdir():
        path.unlink()
    telemetry.directory().rmdir()
    telemetry.forget(MODELS)

    telemetry.open(MODELS[0])
    assert telemetry.path(MODELS[0]).exists()
    telemetry.close()


def test_totals_include_ended_engines() -> None:
    telemetry = EngineTelemetry()
    for number, model in enumerate(MODELS, start=1):
        telemetry.open(model)
        engine = StatsWriter(telemetry.path(model))
        engine.publish(
            EngineLoad(
                running=number,
                waiting=0,
                kv_utilization=0.0,
                kv_capacity_tokens=0,
                scheduling=SchedulingTotals(held=1, preempted=10 * number),
                checkpoints=CheckpointTotals(saved_blocks=100 * number, save_s=0.5),
            )
        )
    loads = [telemetry.load(model) for model in MODELS]
    assert [load.running for load in loads] == [1, 2, 3]
    telemetry.forget(MODELS[:1])
    telemetry.pass_on(MODELS[1], MODELS[0])
    telemetry.open(MODELS[1])
    loads += [telemetry.load(model) for model in (*MODELS, None)]
    telemetry.forget(MODELS)
    loads.append(telemetry.load(None))

    for each in loads:
        assert each.scheduling == SchedulingTotals(held=3, preempted=60)
        assert each.checkpoints == CheckpointTotals(saved_blocks=600, save_s=1.5)
    telemetry.close()
