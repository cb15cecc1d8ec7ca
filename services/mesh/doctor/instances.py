"""The instances of a running mesh, by their own statuses."""

from collections import Counter
from collections.abc import Iterator, Sequence

from services.mesh.doctor.findings import Finding, deviation, note, ok
from shared.contracts.telemetry import InstanceStatus


def on_instances(statuses: Sequence[InstanceStatus]) -> Iterator[Finding]:
    """Findings about engines and models of instances that report; none without instances."""
    if not statuses:
        return
    kinds = Counter(f"{each.engine} on {each.device}" for each in statuses)
    serving = [each for each in statuses if each.takes_in]
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    yield ok("instances", f"{text}; {len(serving)} take requests")
    for each in statuses:
        if not each.takes_in:
            yield _not_taking(each)
    yield from _on_registries(statuses)


def _not_taking(status: InstanceStatus) -> Finding:
    name = f"{status.instance_id} takes no requests"
    if status.draining:
        return note("instances", f"{name}: it drains")
    if status.activating is not None:
        return note("instances", f"{name}: it activates {status.activating}")
    return note(
        "instances",
        f"{name} at the moment",
        so="its queues wait",
        do="if this lasts, look at the agent's log: its engine has ended or does not answer",
    )


def _on_registries(statuses: Sequence[InstanceStatus]) -> Iterator[Finding]:
    states = {each.instance_id: each.registry for each in statuses if each.registry is not None}
    digests = Counter(state.digest for state in states.values())
    if len(digests) > 1:
        common, _ = digests.most_common(1)[0]
        others = sorted(name for name, state in states.items() if state.digest != common)
        yield deviation(
            "models",
            f"other instances have another registry file than {', '.join(others)}",
            so="models that only some instances have wait for these",
            do="give all machines the same registry file",
        )
    for name, state in sorted(states.items()):
        for model, reason in sorted(state.pending.items()):
            yield note("models", f"{name}: the change of {model} has no effect yet: {reason}")
