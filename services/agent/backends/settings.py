"""Settings of the engine and of each backend."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.agent.backends.policies import PolicyName, SchedulingSettings
from shared.contracts.estimates import LatencyCoefficients

Positive = Annotated[int, Meta(ge=1)]
NonNegativeSeconds = Annotated[float, Meta(ge=0)]


class SimulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated engine: a model of an engine with the timing of a latency profile."""

    latency: LatencyCoefficients = LatencyCoefficients(
        constant_s=0.005, linear_s=4e-5, attention_s=1e-8, context_s=2e-7
    )
    """Time of one iteration."""
    time_scale: Annotated[float, Meta(ge=0)] = 1.0
    """Real seconds per simulated second; 0 runs as fast as the machine can."""
    policy: PolicyName = "qoserve"
    """Who decides what each iteration computes."""
    scheduling: SchedulingSettings = SchedulingSettings()
    token_budget: Positive = 512
    """Tokens computed in one iteration at most."""
    max_running: Positive = 64
    """Requests in one iteration at most."""
    kv_capacity_tokens: Positive = 65536
    block_tokens: Positive = 16
    """Tokens in one KV block."""
    host_kv_tokens: Annotated[int, Meta(ge=0)] = 131072
    """Room in host memory for KV checkpoints; 0 is none of them."""
    kv_bytes_per_token: Positive = 2048
    """Size of KV, for what is reported of checkpoints."""
    host_copy_s_per_token: NonNegativeSeconds = 1e-6
    """Time to copy KV to host memory or back."""
    mean_output_tokens: Annotated[int, Meta(ge=2)] = 128
    """Of answers that nothing else ends."""
    first_token: Annotated[int, Meta(ge=0)] = 8
    """Ids below are special tokens and never generated."""
    vocab_size: Annotated[int, Meta(ge=64)] = 512
    """Generated ids are below; a model's `config.json` goes first."""
    warm_activation_s: NonNegativeSeconds = 0.1
    """Time to activate a model that waits in host memory."""
    cold_activation_s: NonNegativeSeconds = 1.0
    """Time to activate a model from storage."""
    warm_bytes: Annotated[int, Meta(ge=0)] = 2 << 30
    """Host memory for warm models; each takes what its weights do, and 512 MiB."""
    crash_on_token: int | None = None
    """Fault injection: a prompt with this token kills the engine."""
    num_layers: Positive = 32
    """Of every model; an iteration takes the same time for each."""
    safepoint_layers: Annotated[int, Meta(ge=0)] = 4
    """Layers from one safepoint to the next; 0 for an engine without."""


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM in a host process of its own. A model's `engine_args` go over all of this."""

    python: str | None = None
    """Interpreter that has vLLM; none is the agent's own."""
    warm_bytes: Annotated[int, Meta(ge=0)] = 2 << 30
    """
    Host memory for warm models: engines that are parked, and weights that are held. The active
    model's is not counted. On a GPU parked engines sleep: weights in host memory, no KV.
    """
    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    """KV memory of each engine; none is 128 MiB on a CPU, and vLLM's own choice on a GPU."""
    host_kv_bytes: Annotated[int, Meta(ge=0)] | None = None
    """
    Host memory of each engine for KV checkpoints; 0 is none of them. CPU only: none is 256 MiB
    there if the model allows checkpoints, and 0 on a GPU, where `engine_args` may set vLLM's own
    `kv_offloading_size`.
    """
    policy: PolicyName | Literal["stock"] = "qoserve"
    """Who decides what each iteration computes: a policy of ours in the engine core, or vLLM."""
    scheduling: SchedulingSettings = SchedulingSettings()
    latency: LatencyCoefficients = LatencyCoefficients(
        constant_s=0.01, linear_s=1e-4, attention_s=1e-8, cross_s=2e-8, context_s=5e-7
    )
    """Time of one iteration until the engine has measured its own: better too long than short."""
    async_scheduling: bool = False
    """
    Schedule an iteration while the one before it runs; GPU only. It hides the scheduler's time.
    Without it telemetry times each iteration by itself, and holding, preemption and new limits
    act on the very next iteration. With it they act one later, an iteration's time is that from
    result to result, and the policy plans from the predicted end of the running iteration.
    """
    max_running: Positive = 64
    """vLLM's max_num_seqs."""
    token_budget: Positive = 2048
    """vLLM's max_num_batched_tokens."""
    block_tokens: Positive | None = None
    """vLLM's block_size; none is 32 on a CPU, and vLLM's own choice on a GPU."""
    prefix_caching: bool = True
    dtype: str | None = None
    """None is float32 on a CPU, and the model's own on a GPU."""
    eager: bool = True
    """Run without compiling the model or capturing graphs."""
    safepoint_layers: Annotated[int, Meta(ge=0)] | None = None
    """
    Layers from one safepoint to the next, where an arriving request with targets may have
    best-effort work dropped (ConServe §4.3); 0 for an engine without. None is 4 where that was
    tested, on a CPU with `eager` and synchronous scheduling, and 0 elsewhere. Only with `qoserve`.
    """
    num_threads: Positive = 1
    """Threads of one engine on a CPU; more than the cores to spare makes it much slower."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 180.0
    """For the host to import vLLM."""
    activate_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """For a model to load."""
    close_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """For an orderly end, before everything is killed."""
    log_path: str | None = None
    """File that gets the engine's output; none is the agent's standard error."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """vLLM's own."""


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which backend serves, and how."""

    backend: str = "simulated"
    """Name in `services.agent.backends.registry`."""
    simulated: SimulatedSettings = SimulatedSettings()
    vllm: VllmSettings = VllmSettings()
