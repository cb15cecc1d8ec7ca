"""Cells of the QoServe benchmark."""

from ops.bench.cells import Cell

PROFILES = ("28", "2x")
ABLATION = ("edf", "dc", "dc+er", "qoserve", "qoserve+curve")
BASELINES = ("sarathi-fcfs", "sarathi-edf")
GPUS = {
    ("28", "qoserve"): 10, ("28", "qoserve+curve"): 9,
    ("2x", "qoserve"): 9, ("2x", "qoserve+curve"): 8,
}  # fmt: skip
"""Number of replicas that must suffice for 35 requests per second."""
GPU_RATE_RPS = 35.0
GPU_HOURS = 360_000 / GPU_RATE_RPS / 3600
SILO_CHUNKS = {"Q1": "sarathi-fcfs:256", "Q2": "sarathi-fcfs:2048", "Q3": "sarathi-fcfs:2048"}
SHARES = {"70-15-15": (0.7, 0.15, 0.15), "15-15-70": (0.15, 0.15, 0.7)}
WAVE_POLICIES = ("sarathi-fcfs", "sarathi-edf", "qoserve+curve", "adaptive")
LOADS_RPS = (2.0, 3.0, 4.0, 5.0, 6.0)
ALPHAS = {1: "qoserve-1ms", 4: "qoserve-4ms", 8: "qoserve"}
"""Work weight in ms per token -> name of the policy that uses it."""
ALPHA_LOADS_RPS = (4.0, 5.0, 6.0)
DEFAULT = "adaptive"
CHALLENGERS = ("quartz", "combined")
"""Policies with which the default policy is compared; the default policy must not be worse."""
MIXES = ("code", "conversation", "sharegpt")
SHARED = (*BASELINES, "qoserve+curve")
PREFILL_POLICIES = ("sarathi-fcfs:8192", "sarathi-edf:8192", "prefill")
CHUNK_POLICIES = ("qoserve", "qoserve+curve")
LONG_POLICIES = ("shrinking", "dc-fcfs")
TIGHT_POLICIES = ("sarathi-edf", "qoserve+curve")
GOODPUT_POLICIES = (*ABLATION[1:], DEFAULT, *CHALLENGERS)
WAVE_HIGHS_RPS = (5.0, 6.0)
TBT_SHARES = (0.25, 0.5, 0.75)
_STARTS_RPS: dict[tuple[str, str, float], tuple[float, float, float]] = {
    ("code", "28", 4): (2.5, 3.2, 3.9), ("code", "2x", 4): (2.3, 3.0, 4.4),
    ("code", "28", 2): (2.6, 3.3, 4.1), ("code", "2x", 2): (2.4, 3.1, 4.6),
    ("conversation", "28", 2): (3.0, 4.2, 4.7), ("sharegpt", "28", 2): (1.45, 2.1, 2.25),
}  # fmt: skip
"""Start rates of searches for FCFS, EDF and other policies, by lengths, profile and hours."""
_SILO_STARTS_RPS = {
    "code": (2.2, 4.3, 4.7), "conversation": (3.7, 6.0, 6.5), "sharegpt": (1.5, 2.4, 2.5)
}  # fmt: skip
"""Start rates of searches for the silos of Q1, Q2 and Q3, by lengths."""
LOAD_POLICIES = ("sarathi-fcfs", "sarathi-edf", "sarathi-srpf", "qoserve", "adaptive")


def overload(profile: str, policy: str, *, hours: float, seed: int) -> Cell:
    """Cell for QoServe's table 5: 6 requests per second on one replica."""
    return Cell(profile=profile, policy=policy, rate_rps=6.0, hours=hours, seed=seed)


def goodput(
    profile: str, policy: str, *, seed: int, hours: float = 4, lengths: str = "code"
) -> Cell:
    """
    Figure 7: the goodput of a policy.

    Cells with an acceptance line run for four hours. Batch work may wait until after the end, which
    favours all policies, most of all in short runs.
    """
    return Cell(kind="goodput", profile=profile, policy=policy, hours=hours, seed=seed,
                rate_rps=_start_rps(policy, (lengths, profile, hours)), lengths=lengths,
                tolerance=0.01 if hours >= 4 else 0.02)  # fmt: skip


def _start_rps(policy: str, traffic: tuple[str, str, float]) -> float:
    """
    Start rate of a search for the goodput; a bad start rate costs time but does not change the
    result.
    """
    fcfs, edf, ours = _STARTS_RPS[traffic]
    return {"sarathi-fcfs": fcfs, "sarathi-edf": edf}.get(policy, ours)


def prefill_goodput(policy: str, *, seed: int) -> Cell:
    """Cell for QoServe's figure 8: replicas that only prefill, conversation traffic."""
    return Cell(kind="goodput", policy=policy, rate_rps=7.0, hours=1, seed=seed,
                lengths="conversation", prefill_only=True, tolerance=0.02)  # fmt: skip


def long_goodput(policy: str, *, seed: int) -> Cell:
    """Cell for QoServe §4.5.1: prompts of 10,000 tokens, answers of 500, all interactive."""
    return Cell(kind="goodput", policy=policy, rate_rps=0.32, hours=1, seed=seed, lengths="long",
                only_class="Q1", tolerance=0.02)  # fmt: skip


def long_iterations(policy: str, *, seed: int) -> Cell:
    """Cell for QoServe's figure 15a: chunks of the traffic of `long_goodput`."""
    return Cell(kind="iterations", policy=policy, rate_rps=0.25, hours=1, seed=seed,
                lengths="long", only_class="Q1")  # fmt: skip


def iterations(policy: str, *, seed: int) -> Cell:
    """Cell for QoServe's figure 9: chunks of conversation traffic near the goodput."""
    return Cell(kind="iterations", policy=policy, rate_rps=4.5, hours=1, seed=seed,
                lengths="conversation")  # fmt: skip


def polyserve(class_name: str, *, seed: int) -> Cell:
    """Cell for QoServe §4.5.2: one bin of PolyServe."""
    policy, start_rps = {"Q1": ("polyserve:50", 2.9), "Q2": ("polyserve:100", 3.65)}[class_name]
    return Cell(kind="goodput", policy=policy, rate_rps=start_rps, hours=1, seed=seed,
                lengths="conversation", classes="two-tbt", only_class=class_name,
                tolerance=0.02)  # fmt: skip


def two_tbt(share: float, *, seed: int) -> Cell:
    """
    Cell for QoServe §4.5.2 with Headway's policy: *share* of the traffic has the shorter TBT
    target.
    """
    return Cell(kind="goodput", rate_rps=5.0, hours=1, seed=seed, lengths="conversation",
                classes="two-tbt", shares=(share, 1 - share), tolerance=0.02)  # fmt: skip


def tight(policy: str, *, seed: int) -> Cell:
    """Cell for QoServe §4.4.2: two of three classes are interactive, conversation traffic."""
    start_rps = 3.2 if policy in BASELINES else 4.2
    return Cell(kind="goodput", policy=policy, rate_rps=start_rps, hours=1, seed=seed,
                lengths="conversation", classes="tight", tolerance=0.02)  # fmt: skip


def silo_goodput(class_name: str, lengths: str, *, seed: int) -> Cell:
    """Cell for Niyama's figure 7a: one replica of a silo, which serves one class."""
    start_rps = dict(zip(SILO_CHUNKS, _SILO_STARTS_RPS[lengths], strict=True))[class_name]
    return Cell(kind="goodput", policy=SILO_CHUNKS[class_name], rate_rps=start_rps, hours=2,
                seed=seed, lengths=lengths, only_class=class_name, tolerance=0.02)  # fmt: skip


def gpus(profile: str, policy: str, *, seed: int) -> Cell:
    """Cell for QoServe's table 4: 360,000 requests on a given number of shared replicas."""
    return Cell(profile=profile, policy=policy, replicas=GPUS[profile, policy],
                rate_rps=GPU_RATE_RPS, hours=GPU_HOURS, seed=seed)  # fmt: skip


def silo_part(profile: str, class_name: str, *, seed: int) -> Cell:
    """
    Cell for the fewest replicas that serve one class; their sum over the classes is the best silo
    deployment.
    """
    return Cell(kind="replicas", profile=profile, policy=SILO_CHUNKS[class_name],
                only_class=class_name, rate_rps=GPU_RATE_RPS / 3, hours=2, seed=seed)  # fmt: skip


def mix(profile: str, policy: str, shares: str, *, seed: int) -> Cell:
    """Cell for QoServe's table 6: shares of the classes."""
    return Cell(profile=profile, policy=policy, shares=SHARES[shares], rate_rps=4.5, seed=seed)


def wave(policy: str, high_rps: float, *, seed: int) -> Cell:
    """
    Cell for QoServe's figure 12: a square wave of load; a fifth of the requests has low importance.
    """
    return Cell(policy=policy, wave=(2.0, high_rps), low_share=0.2, seed=seed)


def load(policy: str, rate_rps: float, *, seed: int) -> Cell:
    """Cell for QoServe's figures 10 and 11: one policy at one rate."""
    return Cell(policy=policy, rate_rps=rate_rps, hours=2, seed=seed)


def quick(seed: int) -> list[Cell]:
    """Cells of the ablation that run in under a minute."""
    return [overload("28", policy, hours=1, seed=seed) for policy in ABLATION]


def full(seed: int) -> list[Cell]:
    """All cells of the benchmark; cells with an acceptance line have three seeds."""
    seeds = (seed, seed + 1, seed + 2)
    cells = [
        overload(profile, policy, hours=4, seed=s)
        for s in seeds
        for profile in PROFILES
        for policy in ABLATION
    ]
    cells += [
        goodput(profile, policy, seed=s)
        for s in seeds
        for profile in PROFILES
        for policy in (*BASELINES, "qoserve+curve")
    ]
    cells += [gpus(profile, policy, seed=s) for s in seeds for profile, policy in GPUS]
    cells += [silo_part(p, c, seed=seed) for p in PROFILES for c in SILO_CHUNKS]
    cells += [mix(p, "qoserve+curve", "70-15-15", seed=s) for s in seeds for p in PROFILES]
    cells += [wave("qoserve+curve", 6.0, seed=s) for s in seeds]
    cells += [default(policy, seed=s) for policy in (DEFAULT, *CHALLENGERS) for s in seeds]
    cells += [goodput("28", p, seed=seed, hours=2) for p in (DEFAULT, *CHALLENGERS)]
    return cells + printed(seed)


def default(policy: str, *, seed: int) -> Cell:
    """
    Cell with one policy at 6 requests/s for two hours, for comparison with the default policy.
    """
    return load(policy, 6.0, seed=seed)


def niyama_goodput(lengths: str, policy: str, *, seed: int) -> Cell:
    """Cell for Niyama's figure 7a: one shared replica for two hours, like the silos."""
    return goodput("28", policy, seed=seed, hours=2, lengths=lengths)


def printed(seed: int) -> list[Cell]:
    """Cells that have no acceptance line."""
    cells = [
        goodput(profile, policy, seed=seed, hours=2)
        for profile in PROFILES
        for policy in ABLATION[1:]
    ]
    cells += [niyama_goodput(x, p, seed=seed) for x in MIXES[1:] for p in SHARED]
    cells += [silo_goodput(name, x, seed=seed) for x in MIXES for name in SILO_CHUNKS]
    cells += [prefill_goodput(policy, seed=seed) for policy in PREFILL_POLICIES]
    cells += [long_goodput(policy, seed=seed) for policy in LONG_POLICIES]
    cells += [long_iterations(policy, seed=seed) for policy in LONG_POLICIES]
    cells += [iterations(policy, seed=seed) for policy in CHUNK_POLICIES]
    cells += [polyserve(name, seed=seed) for name in ("Q1", "Q2")]
    cells += [two_tbt(share, seed=seed) for share in TBT_SHARES]
    cells += [tight(policy, seed=seed) for policy in TIGHT_POLICIES]
    cells += [
        mix(profile, policy, shares, seed=seed)
        for profile in PROFILES
        for shares in SHARES
        for policy in (*BASELINES, "qoserve", "qoserve+curve")
    ]
    cells += [wave(policy, high, seed=seed) for high in WAVE_HIGHS_RPS for policy in WAVE_POLICIES]
    cells += [load(policy, rate, seed=seed) for policy in LOAD_POLICIES for rate in LOADS_RPS]
    cells += [load(p, rate, seed=seed) for p in ALPHAS.values() for rate in ALPHA_LOADS_RPS]
    return cells
