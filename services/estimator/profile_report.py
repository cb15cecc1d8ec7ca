"""Profiles as text for operators."""

from collections.abc import Iterator, Sequence

from services.estimator.text_table import age, aligned, shares
from shared.contracts.base import UnixTime
from shared.contracts.estimates import Calibration, OutputTokens, Profile
from shared.contracts.routing import RouterState, RoutingTrust
from solver.prediction.latency.service_time import ALL_APPLICATIONS
from solver.prediction.lengths.decode_lengths import LEVELS

MOST_APPLICATIONS = 20
_LEGEND = "residuals are predicted minus actual: negative is optimistic"
_NONE = "-"


def lines_of(
    profiles: Sequence[Profile], routers: Sequence[RouterState], *, now: UnixTime
) -> Iterator[str]:
    """
    Text lines of each profile: latency model, rates, lengths, and prediction errors.

    Args:
        profiles: Profiles in display order.
        routers: Latest states of the routers of these models.
        now: Current time, from which ages are computed.
    """
    yield _LEGEND
    for profile in profiles:
        yield ""
        yield f"{profile.model} on {profile.engine} {profile.device}, {age(profile.at, now)}"
        facts = [*_facts(profile, now), *_routers(profile, routers)]
        yield from (f"  {name:<12}{text}" for name, text in facts if text)
        yield from (f"  {line}" for line in _lengths(profile, now))


def _facts(profile: Profile, now: UnixTime) -> Iterator[tuple[str, str]]:
    yield "iterations", f"{profile.num_iterations} learnt"
    if (latency := profile.latency) is not None:
        terms = (
            (latency.constant_s, ""),
            (latency.linear_s, "·P"),
            (latency.attention_s, "·P²"),
            (latency.cross_s, "·P·C"),
            (latency.context_s, "·C"),
        )
        yield "model", " + ".join(f"{1e3 * each:.4g}{of}" for each, of in terms if each) + " ms"
    if (seen := profile.latency_calibration) is not None:
        residual = f"{100 * seen.bias:+z.1f} ± {100 * seen.spread:.1f} %"
        yield "residual", f"{residual} of {seen.count} iterations, {age(seen.at, now)}"
    if profile.token_rate_per_s is not None:
        yield "busy", f"{profile.token_rate_per_s:.1f} tokens/s"
    if (prefill := profile.prefill_s) is not None:
        moments = f"{prefill.mean:.3f} ± {prefill.sd:.3f} s"
        yield "first token", f"{moments} of {prefill.count} requests"
    if (seen := profile.wait_calibration) is not None:
        residual = f"{seen.bias:+z.2f} ± {seen.spread:.2f} s of {seen.count} requests"
        within = f", {shares(seen.coverage)}" if seen.coverage else ""
        yield "waits", f"{residual}{within}, {age(seen.at, now)}"
    if (trees := profile.prefill_trees) is not None:
        made = f"v{trees.version}, {age(trees.at, now)}, of {trees.samples} samples"
        yield "trees", f"{made}; {shares(trees.coverage)} when fitted"
    swaps = sorted(profile.swap_s.items(), key=lambda item: item[1])
    yield "swaps", ", ".join(f"{source} {duration_s:.2f} s" for source, duration_s in swaps)


def _routers(profile: Profile, routers: Sequence[RouterState]) -> Iterator[tuple[str, str]]:
    for state in routers:
        for each in state.trusts:
            key = (state.model, each.engine, each.device)
            if key == (profile.model, profile.engine, profile.device):
                yield "router", f"{state.sender}: {_trust(each)}"


def _trust(trust: RoutingTrust) -> str:
    trusted = "trusted" if trust.trusted else "not trusted: first come, first served, least loaded"
    within = f"{100 * trust.covered:.1f} % of {trust.count} prefills within p{100 * trust.level:g}"
    return f"{trusted}; {within}, residual {1e3 * trust.residual_s:+z.1f} ms; by {trust.version}"


def _lengths(profile: Profile, now: UnixTime) -> Iterator[str]:
    """Table of answer lengths by application, the most recently seen application first."""
    lengths = dict(profile.output_tokens)
    if not lengths:
        return
    of_all = lengths.pop(ALL_APPLICATIONS, None)
    latest = list(reversed(lengths.items()))
    shown = [(ALL_APPLICATIONS, of_all)] if of_all is not None else []
    levels = [f"p{100 * level:g}" for level in LEVELS]
    header = ["answers of", "requests", "mean", "sd", *levels, "residual"]
    header += [f"in {level}" for level in levels] + ["latest"]
    rows = [header]
    rows += [_row(name, each, now) for name, each in [*shown, *latest[:MOST_APPLICATIONS]]]
    yield from aligned(rows)
    if len(latest) > MOST_APPLICATIONS:
        yield f"and {len(latest) - MOST_APPLICATIONS} more applications: --json has them all"


def _row(name: str, lengths: OutputTokens, now: UnixTime) -> list[str]:
    quantiles = dict(lengths.quantiles)
    seen = lengths.calibration
    coverage = dict(seen.coverage) if seen else {}
    levels = [f"{quantiles[level]:.0f}" if level in quantiles else _NONE for level in LEVELS]
    within = [f"{100 * coverage[level]:.0f} %" if level in coverage else _NONE for level in LEVELS]
    moments = [f"{lengths.mean:.1f}", f"{lengths.sd:.1f}"]
    ends = age(seen.at, now) if seen else _NONE
    return [name, str(lengths.count), *moments, *levels, _residual(seen), *within, ends]


def _residual(seen: Calibration | None) -> str:
    return _NONE if seen is None else f"{seen.bias:+z.1f} ± {seen.spread:.1f}"
