"""Which simulations the QoServe benchmark makes."""

from ops.bench.cells import Cell

PROFILES = ("28", "2x")
ABLATION = ("edf", "dc", "dc+er", "qoserve", "qoserve+curve")
BASELINES = ("sarathi-fcfs", "sarathi-edf")
GPUS = {
    ("28", "qoserve"): 10, ("28", "qoserve+curve"): 9,
    ("2x", "qoserve"): 9, ("2x", "qoserve+curve"): 8,
}  # fmt: skip
"""Replicas that must be enough for 35 requests a second."""
GPU_RATE_RPS = 35.0
GPU_HOURS = 360_000 / GPU_RATE_RPS / 3600
SILO_CHUNKS = {"Q1": "sarathi-fcfs:256", "Q2": "sarathi-fcfs:2048", "Q3": "sarathi-fcfs:2048"}
SHARES = {"70-15-15": (0.7, 0.15, 0.15), "15-15-70": (0.15, 0.15, 0.7)}
WAVE_POLICIES = ("sarathi-fcfs", "sarathi-edf", "qoserve+curve", "adaptive")
LOADS_RPS = (2.0, 3.0, 4.0, 5.0, 6.0)
LOAD_POLICIES = ("sarathi-fcfs", "sarathi-edf", "sarathi-srpf", "qoserve", "adaptive")


def overload(profile: str, policy: str, *, hours: float, seed: int) -> Cell:
    """Table 5: 6 requests a second on one replica."""
    return Cell(profile=profile, policy=policy, rate_rps=6.0, hours=hours, seed=seed)


def goodput(
    profile: str, policy: str, *, seed: int, hours: float = 4, lengths: str = "code"
) -> Cell:
    """
    Figure 7.

    Over four hours: in one, batch work may wait until after the end, which flatters all policies.
    """
    return Cell(kind="goodput", profile=profile, policy=policy, rate_rps=5.2 if hours == 4 else 8.0,
                hours=hours, seed=seed, lengths=lengths)  # fmt: skip


def prefill_goodput(policy: str, *, seed: int) -> Cell:
    """Figure 8: replicas that only prefill, conversation traffic."""
    return Cell(kind="goodput", policy=policy, rate_rps=12.8, hours=1, seed=seed,
                lengths="conversation", prefill_only=True)  # fmt: skip


def long_goodput(policy: str, *, seed: int) -> Cell:
    """Section 4.5.1: 10,000 tokens of prompt, 500 of answer, all interactive."""
    return Cell(kind="goodput", policy=policy, rate_rps=0.8, hours=1, seed=seed, lengths="long",
                only_class="Q1")  # fmt: skip


def gpus(profile: str, policy: str, *, seed: int) -> Cell:
    """Table 4: 360,000 requests on a given number of shared replicas."""
    return Cell(profile=profile, policy=policy, replicas=GPUS[profile, policy],
                rate_rps=GPU_RATE_RPS, hours=GPU_HOURS, seed=seed)  # fmt: skip


def silo_part(profile: str, class_name: str, *, seed: int) -> Cell:
    """Fewest replicas for one class on its own; the best silo is their sum."""
    return Cell(kind="replicas", profile=profile, policy=SILO_CHUNKS[class_name],
                only_class=class_name, rate_rps=GPU_RATE_RPS / 3, hours=2, seed=seed)  # fmt: skip


def mix(profile: str, policy: str, shares: str, *, seed: int) -> Cell:
    """Table 6."""
    return Cell(profile=profile, policy=policy, shares=SHARES[shares], rate_rps=4.5, seed=seed)


def wave(policy: str, high_rps: float, *, seed: int) -> Cell:
    """Figure 12: a square wave, a fifth of low importance."""
    return Cell(policy=policy, wave=(2.0, high_rps), low_share=0.2, seed=seed)


def load(policy: str, rate_rps: float, *, seed: int) -> Cell:
    """Figures 10 and 11: one point."""
    return Cell(policy=policy, rate_rps=rate_rps, hours=2, seed=seed)


def quick(seed: int) -> list[Cell]:
    """What shows the order of the parts in under a minute."""
    return [overload("28", policy, hours=1, seed=seed) for policy in ABLATION]


def full(seed: int) -> list[Cell]:
    """Everything; acceptance on three seeds."""
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
    return cells + printed(seed)


def printed(seed: int) -> list[Cell]:
    """What has no bar."""
    cells = [
        goodput(profile, policy, seed=seed, hours=1)
        for profile in PROFILES
        for policy in (*BASELINES, *ABLATION[1:])
    ]
    cells += [
        goodput("28", policy, seed=seed, hours=1, lengths="conversation")
        for policy in (*BASELINES, "qoserve", "qoserve+curve")
    ]
    cells += [
        prefill_goodput(policy, seed=seed)
        for policy in ("sarathi-fcfs:8192", "sarathi-edf:8192", "prefill")
    ]
    cells += [long_goodput(policy, seed=seed) for policy in ("shrinking", "dc-fcfs")]
    cells += [
        mix(profile, policy, shares, seed=seed)
        for profile in PROFILES
        for shares in SHARES
        for policy in (*BASELINES, "qoserve", "qoserve+curve")
    ]
    cells += [wave(policy, high, seed=seed) for high in (5.0, 6.0) for policy in WAVE_POLICIES]
    cells += [load(policy, rate, seed=seed) for policy in LOAD_POLICIES for rate in LOADS_RPS]
    cells += [overload("28", x, hours=4, seed=seed) for x in ("adaptive", "quartz", "combined")]
    return cells
