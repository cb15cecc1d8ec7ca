"""The routed mesh in the simulator: the same arrivals, engines and policy, in virtual time."""

from collections.abc import Sequence

from ops.bench.routed_waits import ServedRequest
from ops.sim.limits import EngineLimits
from ops.sim.routing.cluster import RoutingCluster, simulate_front
from ops.sim.routing.fronts import Front, PulledQueue, Routers, RouterSeat
from ops.sim.routing.summary import ttft_s
from ops.sim.routing.workload import RoutedArrival
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.latency_model import predict_s
from solver.prediction.prefill.latency_prefills import LatencyPrefills
from solver.routing.device_prefills import LEVELS, DevicePrefills
from solver.routing.options import VARIANTS
from solver.routing.request import RoutedRequest
from solver.scheduling.engine.latency import LatencyTable

_DEVICE = ("simulated", "simulated")


def simulated(
    mode: str,
    work: Sequence[RoutedArrival],
    latency: LatencyCoefficients,
    limits: EngineLimits,
    paces: tuple[float, ...],
    *,
    seed: int,
) -> list[ServedRequest]:
    """
    Simulated outcomes of the requests *work*; routers know what routers in a mesh without fitted
    trees know.
    """
    cluster = RoutingCluster(
        latency=LatencyTable.from_coefficients(latency, max_tokens=limits.max_budget_tokens),
        num_instances=len(paces),
        paces=paces,
        limits=limits,
        noise=0.0,
        seed=seed,
    )
    outcome = simulate_front(work, cluster, _front(mode, cluster, latency, seed))
    return [
        ServedRequest(
            attained=not each.violated,
            ttft_s=ttft_s(each, outcome),
            prompt_tokens=each.arrival.prompt_tokens,
            cached_tokens=each.cached_tokens,
        )
        for each in outcome.requests
    ]


def _front(mode: str, cluster: RoutingCluster, latency: LatencyCoefficients, seed: int) -> Front:
    def prefill_s(request: RoutedRequest) -> float:
        return predict_s(latency, compute_tokens=request.prompt_tokens, context_tokens=0)

    if mode == "pull":
        return PulledQueue(cluster.instance_ids, prefill_s)
    prefills = DevicePrefills(options=VARIANTS[mode], origin="simulated")
    prefills.device_of = dict.fromkeys(cluster.instance_ids, _DEVICE)
    prefills.use(_DEVICE, LatencyPrefills(latency, LEVELS), "latency")
    return Routers(cluster.instance_ids, VARIANTS[mode], [RouterSeat(prefills, prefills)], seed)
