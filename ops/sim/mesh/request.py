"""A request of the simulated mesh: its model, its lane, and its history."""

from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import InstanceId, ModelName, RequestId, Seconds


class MeshRequest(SimRequest):
    """
    A request in lanes and engines; lanes, engine and instance write its fields.

    The counters do not change while the request decodes; `BatchEngine` updates them when the
    request ends or leaves the engine.
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
        "work_tokens",
    )

    def __init__(self, number: int, arrival: Arrival, model: ModelName) -> None:
        super().__init__(RequestId(str(number)), arrival)
        self.model = model
        self.place_in_traffic = number
        self.lane = ""
        self.work_tokens = 0.0
        """Prompt and expected answer, in tokens, as predicted when the request entered its lane."""
        self.relegated = False
        """True after the request was relegated."""
        self.instance_id: InstanceId | None = None
        """Instance on which the request ran last."""
        self.num_evicted = 0
        """Number of evictions of the request."""
        self.num_swapped = 0
        """Number of swap-outs of the request."""
        self.kept_tokens = 0
        """Number of computed tokens of the request whose KV is in host memory."""
        self.place = 0
        """Position of the request in the engine's order of arrival."""
        self.joined_step = 0
        self.end_step = 0
        """Decode steps of the engine at which the request joined and at which it will end."""

    @property
    def left_s(self) -> Seconds:
        """Time from arrival to deadline; infinite for best effort."""
        return self.deadline_at - self.arrival.arrived_at

    def restart(self) -> None:
        """Let the request begin again without its answer so far."""
        self.num_output_tokens = 0
        self.first_token_at = None
        self.forget()

    def forget(self) -> None:
        """Drop the KV of the request: its prompt and its answer so far must be prefilled again."""
        self.num_prefill_tokens = self.arrival.prompt_tokens + self.num_output_tokens
        self.num_computed_tokens = 0
        self.kept_tokens = 0
        self.is_prefill = True
