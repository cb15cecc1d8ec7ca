"""Settings of the engine and of each backend."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from services.agent.backends.policies import SchedulingSettings, check_policy
from shared.contracts.base import NonEmpty
from shared.contracts.estimates import LatencyCoefficients

STOCK = "stock"
"""Name of vLLM's own policy."""
Positive = Annotated[int, Meta(ge=1)]
NonNegativeSeconds = Annotated[float, Meta(ge=0)]


class SimulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Settings of the simulated engine, whose iterations take as long as a latency model predicts.
    """

    latency: LatencyCoefficients = LatencyCoefficients(
        constant_s=0.005, linear_s=4e-5, attention_s=1e-8, context_s=2e-7
    )
    """Coefficients from which the simulated engine computes the time of an iteration."""
    time_scale: Annotated[float, Meta(ge=0)] = 1.0
    """Real seconds per simulated second; 0: iterations take no real time."""
    policy: str = "qoserve"
    """
    Policy that decides what each iteration computes: one of Headway or of an installed package.
    """
    scheduling: SchedulingSettings = SchedulingSettings()
    token_budget: Positive = 512
    """Maximum number of tokens computed in one iteration."""
    max_running: Positive = 64
    """Maximum number of requests in one iteration."""
    kv_capacity_tokens: Positive = 65536
    block_tokens: Positive = 16
    """Tokens in one KV block."""
    host_kv_tokens: Annotated[int, Meta(ge=0)] = 131072
    """Host memory for KV checkpoints, in tokens; 0 turns checkpoints off."""
    kv_bytes_per_token: Positive = 2048
    """KV size in bytes per token, for reports of checkpoints."""
    host_copy_s_per_token: NonNegativeSeconds = 1e-6
    """Time to copy KV to host memory or back."""
    mean_output_tokens: Annotated[int, Meta(ge=2)] = 128
    """Mean length, in tokens, of answers that end with the model's end token."""
    first_token: Annotated[int, Meta(ge=0)] = 8
    """Smallest token id that the simulated engine generates; lower ids are special tokens."""
    vocab_size: Annotated[int, Meta(ge=64)] = 512
    """Exclusive upper bound of generated token ids; a model's `config.json` takes precedence."""
    warm_activation_s: NonNegativeSeconds = 0.1
    """Time to activate a model that is in host memory."""
    cold_activation_s: NonNegativeSeconds = 1.0
    """Time to activate a model from storage."""
    warm_bytes: Annotated[int, Meta(ge=0)] = 2 << 30
    """Host memory for warm models; each takes the size of its weights plus 512 MiB."""
    crash_on_token: int | None = None
    """Fault injection: a prompt with this token kills the engine."""
    num_layers: Positive = 32
    """Number of layers of every model; each layer takes the same share of an iteration's time."""
    safepoint_layers: Annotated[int, Meta(ge=0)] = 4
    """Layers between safepoints; 0 for an engine without safepoints."""

    def __post_init__(self) -> None:
        check_policy(self.policy)


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of vLLM in a separate host process. A model's `engine_args` take precedence."""

    python: NonEmpty | None = None
    """Interpreter that has vLLM installed; None selects the agent's own interpreter."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the host process besides those of the agent."""
    warm_bytes: Annotated[int, Meta(ge=0)] | None = None
    """
    Host memory for warm models (parked engines and held weights); the active model does not count.
    None: half of the memory that is available when the agent starts, divided by the GPUs of the
    host. Set it where several agents without GPUs share a host.

    On a GPU, a parked engine keeps its weights in host memory and has no KV.
    """
    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    """KV memory of each vLLM engine; None: 128 MiB on a CPU, vLLM's default on a GPU."""
    host_kv_bytes: Annotated[int, Meta(ge=0)] | None = None
    """
    Host memory of each engine for KV checkpoints; 0 turns checkpoints off. None: 256 MiB on a CPU
    if the model allows checkpoints, and 0 on a GPU, where only vLLM's own `kv_offloading_size` in
    `engine_args` is available.
    """
    policy: str = "qoserve"
    """
    Policy that selects each iteration's work: one of Headway or of an installed package, or vLLM's
    own (`stock`).
    """
    scheduling: SchedulingSettings = SchedulingSettings()
    latency: LatencyCoefficients = LatencyCoefficients(
        constant_s=0.01, linear_s=1e-4, attention_s=1e-8, cross_s=2e-8, context_s=5e-7
    )
    """
    Time of one iteration that is assumed until the engine has measured its iterations.

    An overestimate is safer than an underestimate.
    """
    async_scheduling: bool | None = None
    """
    Schedule the next iteration while the previous one runs, which hides the scheduler's time on a
    GPU. None: False on a CPU; on a GPU vLLM's default, which is True unless the model or the
    executor does not support it.

    False: telemetry times each iteration separately, and holds, preemptions and new limits apply to
    the next iteration.

    True: holds, preemptions and new limits apply one iteration later, an iteration's time is
    measured from result to result, and the policy plans from the predicted end of the running
    iteration.
    """
    max_running: Positive | None = None
    """
    Value of vLLM's `max_num_seqs`: maximum number of requests in one iteration; None: 64 on a CPU,
    vLLM's default on a GPU.
    """
    token_budget: Positive | None = None
    """
    Value of vLLM's `max_num_batched_tokens`: maximum number of tokens in one iteration; None: 2048
    on a CPU, vLLM's default on a GPU.
    """
    block_tokens: Positive | None = None
    """Value of vLLM's `block_size`; None: 32 on a CPU, vLLM's default on a GPU."""
    prefix_caching: bool = True
    dtype: str | None = None
    """Data type of weights; None: float32 on a CPU, the model's own type on a GPU."""
    eager: bool | None = None
    """
    True: vLLM neither compiles the model nor captures CUDA graphs. None: True on a CPU; False on a
    GPU unless `safepoint_layers` is set, since compiled models have no safepoints.
    """
    safepoint_layers: Annotated[int, Meta(ge=0)] | None = None
    """
    Layers between safepoints, at which best-effort work may be dropped for an arriving request with
    targets (ConServe §4.3); 0 turns safepoints off. Safepoints require the policy `qoserve`.

    None: 4 on a CPU with `eager` and synchronous scheduling, which is the tested configuration, and
    0 elsewhere. With a value above 0, `eager` is True and `async_scheduling` False by default on
    every device.
    """
    num_threads: Positive = 1
    """Threads of one engine on a CPU; more threads than free cores make the engine much slower."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 180.0
    """Time limit for the host process to import vLLM."""
    activate_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Time limit for loading a model into the engine."""
    grammar_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Time limit for compiling the grammar of a structured answer; beyond it, its request fails."""
    close_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Time limit for an orderly shutdown of the engine; after it, all its processes are killed."""
    log_path: NonEmpty | None = None
    """File for the engine's output; None selects the agent's standard error."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Log level of vLLM."""

    def __post_init__(self) -> None:
        check_policy(self.policy, STOCK)


class RemoteSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a server that others run, or of all servers behind one name."""

    url: str = ""
    """
    Address of the server, e.g. `http://models.example:8000`; or fixed addresses of several servers,
    with spaces between them.

    A name with several addresses, and `file:PATH`, a file with one address per line, stand for
    several servers, each of which becomes an instance; they may change while the agent runs. With
    the prefix `router+`, the address is that of a router, which is one instance.
    """
    host: str | None = None
    """Value of the header `Host`; None: that of the address."""
    model: str | None = None
    """
    Name of the model at the server; None: the model's name in the registry, or the only model that
    the server lists.
    """
    api_key: str | None = None
    """Key that is sent as bearer token; better set as `HEADWAY_AGENT_ENGINE__REMOTE__API_KEY`."""
    ca_file: NonEmpty | None = None
    """File with certificates of authorities for `https`; None: those of the system."""
    fields: tuple[str, ...] | None = None
    """
    Fields of bodies that the server honours; requests with others are refused. `["*"]`: all. None:
    all for vLLM, and for servers of other makes, which may ignore fields, the fields of a plain
    request (`PLAIN_FIELDS` of `services/agent/backends/remote/body_run.py`).
    """
    device: str | None = None
    """
    Kind of the server's device; servers of equal device share a profile. None: each server has a
    profile of its own.
    """
    shared_address: bool = False
    """True if several servers answer at the address, so that its metrics are not of one server."""
    shared: bool = False
    """
    True if other agents may serve with the same server. Otherwise the first agent has it, and the
    others wait.
    """
    max_running: Positive = 256
    """Maximum number of requests at the server; fewer if requests wait there."""
    reads_bodies: bool | None = None
    """
    True: an engine host with vLLM runs beside the agent, so that a model that takes tokens also
    answers bodies. None: where vLLM is installed.
    """
    connect_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    silence_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Time without a byte of an answer after which the connection counts as lost."""


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selection of the engine backend, and the settings of each backend."""

    backend: str = "simulated"
    """
    Name of a backend in `services.agent.backends.registry`, or in a package that adds one by an
    entry point in the group `headway.engines`.
    """
    simulated: SimulatedSettings = SimulatedSettings()
    vllm: VllmSettings = VllmSettings()
    remote: RemoteSettings = RemoteSettings()
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a backend that a package adds; the package defines their names."""
