"""Settings of the engine and of each backend."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.agent.backends.policies import PolicyName, SchedulingSettings
from shared.contracts.estimates import LatencyCoefficients

Positive = Annotated[int, Meta(ge=1)]
NonNegativeSeconds = Annotated[float, Meta(ge=0)]


class SimulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated engine, with the timing of a latency profile."""

    latency: LatencyCoefficients = LatencyCoefficients(
        constant_s=0.005, linear_s=4e-5, attention_s=1e-8, context_s=2e-7
    )
    """Time of one iteration."""
    time_scale: Annotated[float, Meta(ge=0)] = 1.0
    """Real seconds per simulated second; 0 runs at full speed."""
    policy: PolicyName = "qoserve"
    """Policy that decides what each iteration computes."""
    scheduling: SchedulingSettings = SchedulingSettings()
    token_budget: Positive = 512
    """Maximum number of tokens computed in one iteration."""
    max_running: Positive = 64
    """Maximum number of requests in one iteration."""
    kv_capacity_tokens: Positive = 65536
    block_tokens: Positive = 16
    """Tokens in one KV block."""
    host_kv_tokens: Annotated[int, Meta(ge=0)] = 131072
    """Host memory for KV checkpoints, in tokens; 0 turns them off."""
    kv_bytes_per_token: Positive = 2048
    """KV size in bytes per token, for reports of checkpoints."""
    host_copy_s_per_token: NonNegativeSeconds = 1e-6
    """Time to copy KV to host memory or back."""
    mean_output_tokens: Annotated[int, Meta(ge=2)] = 128
    """Mean length of answers that no limit and no stop condition ends."""
    first_token: Annotated[int, Meta(ge=0)] = 8
    """Smallest generated id: ids below are special tokens."""
    vocab_size: Annotated[int, Meta(ge=64)] = 512
    """Upper bound of generated ids (exclusive); a model's `config.json` takes precedence."""
    warm_activation_s: NonNegativeSeconds = 0.1
    """Time to activate a model that is in host memory."""
    cold_activation_s: NonNegativeSeconds = 1.0
    """Time to activate a model from storage."""
    warm_bytes: Annotated[int, Meta(ge=0)] = 2 << 30
    """Host memory for warm models; each takes the size of its weights plus 512 MiB."""
    crash_on_token: int | None = None
    """Fault injection: a prompt with this token kills the engine."""
    num_layers: Positive = 32
    """Layers of every model; all take the same share of an iteration."""
    safepoint_layers: Annotated[int, Meta(ge=0)] = 4
    """Layers between safepoints; 0 for an engine without safepoints."""


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM in a separate host process. A model's `engine_args` override all of these settings."""

    python: str | None = None
    """Interpreter that has vLLM installed; None is the agent's own."""
    warm_bytes: Annotated[int, Meta(ge=0)] = 2 << 30
    """
    Host memory for warm models: parked engines and held weights. The memory of the active model is
    not counted. On a GPU parked engines sleep: their weights are in host memory, and they have no
    KV.
    """
    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    """KV memory of each engine; None is 128 MiB on a CPU, and vLLM's own choice on a GPU."""
    host_kv_bytes: Annotated[int, Meta(ge=0)] | None = None
    """
    Host memory of each engine for KV checkpoints; 0 turns them off. CPU only: None is 256 MiB
    there if the model allows checkpoints, and 0 on a GPU, where `engine_args` may set vLLM's own
    `kv_offloading_size`.
    """
    policy: PolicyName | Literal["stock"] = "qoserve"
    """Policy that decides what each iteration computes: one of Headway's, or vLLM's (`stock`)."""
    scheduling: SchedulingSettings = SchedulingSettings()
    latency: LatencyCoefficients = LatencyCoefficients(
        constant_s=0.01, linear_s=1e-4, attention_s=1e-8, cross_s=2e-8, context_s=5e-7
    )
    """
    Time of one iteration until the engine has measured its iterations; an overestimate is safer.
    """
    async_scheduling: bool = False
    """
    Schedule an iteration while the previous one runs; GPU only. It hides the scheduler's time.
    Without it telemetry times each iteration separately, and holding, preemption and new limits
    apply to the very next iteration. With it they apply one iteration later, an iteration's time is
    measured from result to result, and the policy plans from the predicted end of the running one.
    """
    max_running: Positive = 64
    """vLLM's `max_num_seqs`."""
    token_budget: Positive = 2048
    """vLLM's `max_num_batched_tokens`."""
    block_tokens: Positive | None = None
    """vLLM's `block_size`; None is 32 on a CPU, and vLLM's own choice on a GPU."""
    prefix_caching: bool = True
    dtype: str | None = None
    """None is float32 on a CPU, and the model's own on a GPU."""
    eager: bool = True
    """Run without compiling the model or capturing graphs."""
    safepoint_layers: Annotated[int, Meta(ge=0)] | None = None
    """
    Layers between safepoints, at which best-effort work may be dropped for an arriving request with
    targets (ConServe §4.3); 0 for an engine without safepoints. None is 4 where that was tested, on
    a CPU with `eager` and synchronous scheduling, and 0 elsewhere. Only with `qoserve`.
    """
    num_threads: Positive = 1
    """Threads of one engine on a CPU; more threads than free cores make it much slower."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 180.0
    """Time limit for the host to import vLLM."""
    activate_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Time limit for loading a model."""
    close_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Time limit for an orderly shutdown, before all processes are killed."""
    log_path: str | None = None
    """File for the engine's output; None is the agent's standard error."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Log level of vLLM."""


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selection and settings of the backend."""

    backend: str = "simulated"
    """Name in `services.agent.backends.registry`."""
    simulated: SimulatedSettings = SimulatedSettings()
    vllm: VllmSettings = VllmSettings()
