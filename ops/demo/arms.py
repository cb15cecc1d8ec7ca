"""
The two arms: plain first come first served, and Headway with all defaults.

The comparison isolates the order of service. The arms have in common: broker, processes, number of
agents, models, engines and their limits (`ENGINE_LIMITS`), late pulls, model swaps, and recovery
after a kill. `FCFS` lists every setting in which the FCFS arm differs, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ops.ports import free_port
from services.mesh.spec import AgentSpec, MeshSpec
from shared.contracts.base import Seconds
from shared.contracts.ingress import InferenceRequest
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Importance, Slo

MODELS = ("tiny-llama", "tiny-qwen")
NUM_AGENTS = 2
MAX_RUNNING = 12
"""Maximum number of requests in one iteration of an engine."""
UNIFORM_TARGET_S: Seconds = 600.0
"""Target of every request in the FCFS arm; too long to be missed, so that nothing is relegated."""

ENGINE_LIMITS: Mapping[str, dict[str, Any]] = {
    "simulated": {
        "max_running": MAX_RUNNING,
        "latency": {"constant_s": 0.02, "linear_s": 1e-4, "attention_s": 1e-8, "context_s": 2e-7},
    },
    "vllm": {"max_running": MAX_RUNNING},
}
"""
Settings of the engines in both arms; other settings have their defaults.

The simulated engine takes about 25 ms for an iteration, like the tiny models on a CPU. So the fleet
serves some twenty requests per second, and the mesh's own CPU time is small in comparison.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm of the demo: a mesh configuration that serves the load."""

    name: str
    """Name of the arm; part of instance ids and request ids."""
    title: str
    uniform_slo: Slo | None = None
    """
    Replaces each request's target, with importance `high`; None: requests keep target and
    importance.
    """
    engine_policy: Mapping[str, str] = field(default_factory=dict)
    """Scheduling policy of each engine backend; empty: the default policy."""
    warm_models: tuple[str, ...] = ()
    """Models that each agent holds warm at the start, beside its initial model."""
    fixed_models: bool = False
    """True: each agent serves its initial model only; False: every agent may serve every model."""
    initial_models: tuple[str, ...] = (MODELS[0],) * NUM_AGENTS
    """Model of each agent that is active at the start."""
    planner: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the planner in this arm."""
    layout: LaneLayout = field(default_factory=LaneLayout)

    def spec(self, *, engine: str, broker: str, registry: Path, log_dir: Path) -> MeshSpec:
        """The mesh of this arm; each agent starts with its initial model."""
        limits = dict(ENGINE_LIMITS[engine])
        if engine in self.engine_policy:
            limits["policy"] = self.engine_policy[engine]
        return MeshSpec(
            broker=broker,
            registry=registry,
            log_dir=log_dir / self.name,
            gateway_port=free_port(),
            # The demo compares orders of service; vLLM's application would need a third core.
            planner=dict(self.planner),
            layout=self.layout,
            agents=tuple(
                AgentSpec(
                    instance_id=f"{self.name}-{number}",
                    engine=engine,
                    settings={
                        "initial_model": initial,
                        "warm_models": list(self.warm_models),
                        "models": [initial] if self.fixed_models else [],
                        "drain_timeout_s": 2.0,
                        "engine": {engine: limits},
                    },
                )
                for number, initial in enumerate(self.initial_models)
            ),
        )

    @property
    def killed_agent(self) -> str:
        """Name of the agent process that is killed."""
        return f"agent-{self.name}-0"

    def published(self, body: InferenceRequest) -> InferenceRequest:
        """The request in the form in which it is published to this arm."""
        body = msgspec.structs.replace(body, id=f"{self.name}-{body.id}")
        if self.uniform_slo is None:
            return body
        return msgspec.structs.replace(body, slo=self.uniform_slo, importance=Importance.HIGH)


FCFS = Arm(
    name="fcfs",
    title="FCFS",
    # All requests have one target, so that deadlines are arrival times plus a constant: the order
    # by deadline, which lanes, windows and plans use, is then the order of arrival. Engine and
    # planner do not get the targets by which the sender judges. Without a target, all work would
    # be best effort, which agents limit to a part of their slots; this would be unfair.
    uniform_slo=Slo(ttlt_s=UNIFORM_TARGET_S),
    # The engine serves in the order of submission; vLLM uses its unmodified scheduler.
    engine_policy={"simulated": "fcfs", "vllm": "stock"},
    # One model per engine, as behind a proxy, is the best FCFS arm that was measured. With
    # simulated engines and 12 s of load, it met 71 and 78 % of the targets (seeds 0 and 1). With
    # model swaps from the same start, plans by `qlm` (which made no swap) met 71 and 78 %,
    # `edf-batching` 51 and 64 %, `fcfs` 43 and 58 %. With one model on all engines at the start,
    # `qlm` met 57 to 61 %.
    fixed_models=True,
    # Headway starts with the first model on all engines and must swap models; this arm starts with
    # the placement that the load needs.
    initial_models=MODELS,
    # Serve the oldest work first.
    planner={"leader": {"policy": "fcfs"}},
    # One lane per model: short and long requests are not separated.
    layout=LaneLayout(num_work_classes=1),
)
# Both models are loaded at the start, as in a fleet that moves between models: a cold start of vLLM
# takes both cores of a small machine for 20 s.
HEADWAY = Arm(name="headway", title="Headway", warm_models=MODELS[1:])
ARMS = (FCFS, HEADWAY)
