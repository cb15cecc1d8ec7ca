"""A request of the simulated mesh: its model, its lane, and its history."""

from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import InstanceId, ModelName, RequestId, Seconds


class MeshRequest(SimRequest):
    """
    A request in lanes and engines. The lanes, the engine and the instance write it.

    Its counters do not change while it decodes; `BatchEngine` settles them when it leaves.
    """

    __slots__ = (
        "end_step",
        "instance_id",
        "joined_step",
        "kept_tokens",
        "lane",
        "model",
        "num_evicted",
        "num_swapped",
        "place",
        "place_in_traffic",
        "relegated",
    )

    def __init__(self, number: int, arrival: Arrival, model: ModelName) -> None:
        super().__init__(RequestId(str(number)), arrival)
        self.model = model
        self.place_in_traffic = number
        self.lane = ""
        self.relegated = False
        """True once it was relegated."""
        self.instance_id: InstanceId | None = None
        """Instance where it ran last."""
        self.num_evicted = 0
        """Number of evictions."""
        self.num_swapped = 0
        """Number of swap-outs."""
        self.kept_tokens = 0
        """Computed tokens whose KV is in host memory."""
        self.place = 0
        """Place in its engine's order."""
        self.joined_step = 0
        self.end_step = 0
        """Decode steps of the engine when it joined and when it will be done."""

    @property
    def left_s(self) -> Seconds:
        """Time from arrival to deadline; infinite for best effort."""
        return self.deadline_at - self.arrival.arrived_at

    def restart(self) -> None:
        """Begin again: the answer so far is also lost."""
        self.num_output_tokens = 0
        self.first_token_at = None
        self.forget()

    def forget(self) -> None:
        """Drop its KV: everything except the answer so far must be recomputed."""
        self.num_prefill_tokens = self.arrival.prompt_tokens + self.num_output_tokens
        self.num_computed_tokens = 0
        self.kept_tokens = 0
        self.is_prefill = True
