"""A request of the simulated mesh: its model, its lane, and what was done to it."""

from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import InstanceId, ModelName, RequestId, Seconds


class MeshRequest(SimRequest):
    """
    A request in lanes and engines. The lanes, the engine and the instance write it.

    While it decodes its counters stand still; `BatchEngine` settles them when it leaves.
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
        """It lost its claim to its deadline."""
        self.instance_id: InstanceId | None = None
        """Where it ran last."""
        self.num_evicted = 0
        """Its KV was dropped for the sake of others."""
        self.num_swapped = 0
        """Its KV rested in host memory."""
        self.kept_tokens = 0
        """Computed tokens whose KV is in host memory."""
        self.place = 0
        """Order in its engine."""
        self.joined_step = 0
        self.end_step = 0
        """Of the engine's decoding, when it joined and when it will be done."""

    @property
    def left_s(self) -> Seconds:
        """From arrival to deadline; infinite for best effort."""
        return self.deadline_at - self.arrival.arrived_at

    def restart(self) -> None:
        """Its answer so far is lost, too."""
        self.num_output_tokens = 0
        self.first_token_at = None
        self.forget()

    def forget(self) -> None:
        """Its KV is gone: all but the answer so far has to be computed again."""
        self.num_prefill_tokens = self.arrival.prompt_tokens + self.num_output_tokens
        self.num_computed_tokens = 0
        self.kept_tokens = 0
        self.is_prefill = True
