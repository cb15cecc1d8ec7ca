"""Where models begin on given devices, and what is said about those that do not fit."""

import pytest

from shared.contracts.base import ModelName
from solver.planning.placement.problem import GIB, DevicePlace, Fleet, ModelNeed
from solver.planning.placement.program import place


def model(name: str, *, devices: int = 1, weights: float = 10, context: float = 2) -> ModelNeed:
    return ModelNeed(
        name=ModelName(name),
        num_devices=devices,
        weight_bytes=int(weights * GIB),
        context_bytes=int(context * GIB),
        memory_share=0.9,
    )


def fleet(
    num_devices: int, *models: ModelNeed, agents: int | None = None, host: int = 1000
) -> Fleet:
    devices = tuple(
        DevicePlace(name=f"GPU {at}", kind="H200", memory_bytes=140 * GIB)
        for at in range(num_devices)
    )
    return Fleet(devices=devices, models=models, host_bytes=host * GIB, num_agents=agents)


def begun(found: Fleet) -> list[tuple[tuple[int, ...], str]]:
    return [(agent.devices, agent.first) for agent in place(found).agents]


def test_each_device_gets_an_agent_and_models_take_turns():
    models = (model("a"), model("b"), model("c"))
    assert begun(fleet(4, *models)) == [((0,), "a"), ((1,), "a"), ((2,), "b"), ((3,), "c")]


def test_a_model_on_two_devices_gets_a_pair_of_neighbours():
    found = begun(fleet(4, model("a"), model("large", devices=2, weights=130), model("c")))
    assert found == [((0,), "a"), ((1,), "c"), ((2, 3), "large")]


def test_models_share_an_agent_if_there_are_more_models_than_devices():
    (agent,) = place(fleet(1, model("a"), model("b"))).agents
    assert (agent.first, agent.models, agent.warm) == ("a", ("a", "b"), ("b",))
    assert agent.warm_bytes == 11 * GIB


def test_host_memory_limits_what_is_warm():
    (agent,) = place(fleet(1, model("a"), model("b"), model("c"), host=15)).agents
    assert len(agent.warm) == 1
    (agent,) = place(fleet(1, model("a"), model("b"), host=10)).agents
    assert agent.warm == ()


def test_fewer_agents_leave_devices_free():
    assert len(begun(fleet(4, model("a"), model("b"), agents=2))) == 2


def test_devices_of_different_kinds_form_no_group():
    mixed = Fleet(
        devices=tuple(
            DevicePlace(name=f"GPU {at}", kind=kind, memory_bytes=80 * GIB)
            for at, kind in enumerate(("A100", "H100", "H100"))
        ),
        models=(model("large", devices=2, weights=100), model("small")),
        host_bytes=0,
    )
    assert begun(mixed) == [((0,), "small"), ((1, 2), "large")]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            fleet(4, model("huge", weights=130), model("a")),
            "model huge needs 145.0 GiB of device memory",
        ),
        (
            fleet(4, model("huge", devices=2, weights=260)),
            "and GPU 0 and GPU 1 give 252.0 GiB (0.9 of 280.0 GiB): 36.0 GiB too little",
        ),
        (
            fleet(4, model("wide", devices=8)),
            "model wide needs 8 adjacent devices of one kind",
        ),
        (
            fleet(4, model("pair", devices=2), model("a"), agents=4),
            "4 agents have no place: with these models, 4 devices can have 1 to 3 (--agents)",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_sizes(found: Fleet, message: str):
    placement = place(found)
    assert placement.agents == ()
    assert message in placement.misfits[0]
