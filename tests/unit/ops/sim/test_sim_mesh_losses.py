"""When an instance of the simulated mesh dies, its requests begin again on other instances."""

from ops.sim.mesh.arms import ARMS
from ops.sim.mesh.cluster import Loss, MeshOptions, MeshOutcome, simulate_mesh
from ops.sim.mesh.kinds import A100, MISTRAL_7B, Fleet
from ops.sim.mesh.workload import MeshTraffic
from shared.contracts.base import ModelName

MODEL = ModelName("a")
LOST_AT_S = 4.0


def served(*losses: Loss) -> MeshOutcome:
    """Serve eight seconds of traffic with two instances of one model."""
    traffic = MeshTraffic(models={MODEL: 1.0}, rate_rps=6.0, duration_s=8.0, seed=0)
    fleet = Fleet(devices=(A100, A100), models={MODEL: MISTRAL_7B})
    arm = ARMS["qlm"]
    options = MeshOptions(
        fleet=fleet, conduct=arm.conduct, planner=arm.planner(0, 4.0), losses=losses
    )
    return simulate_mesh(traffic.arrivals(), options)


def test_remaining_instances_serve_all_requests_completely():
    outcome = served(Loss(number=0, at=LOST_AT_S))
    began_before = [r for r in outcome.requests if r.finished_at and r.finished_at < LOST_AT_S]
    others = [r for r in outcome.requests if r not in began_before]

    assert all(r.num_output_tokens == r.output_tokens for r in outcome.requests)
    assert {r.instance_id for r in began_before} == {"a100-0", "a100-1"}
    assert {r.instance_id for r in others} == {"a100-1"}


def test_answers_restart_after_the_loss_of_their_instance():
    """Requests with a first token from the lost instance get a new first token later."""
    calm = {r.request_id: r for r in served().requests}
    struck = served(Loss(number=0, at=LOST_AT_S))
    again = [
        r
        for r in struck.requests
        if (was := calm[r.request_id]).instance_id == "a100-0"
        and was.first_token_at < LOST_AT_S < was.finished_at
    ]

    assert again
    assert all(r.first_token_at > LOST_AT_S for r in again)
    assert struck.wasted_tokens > 0


def test_losses_are_in_order_of_time_and_reproducible():
    loss = Loss(number=1, at=LOST_AT_S)

    assert [r.finished_at for r in served(loss).requests] == [
        r.finished_at for r in served(loss).requests
    ]
