"""Properties of placements on devices."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from solver.planning.placement.problem import DevicePlace, Fleet, ModelNeed
from solver.planning.placement.program import place

GIB = 1 << 30


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    kinds = draw(st.lists(st.sampled_from(("H200", "L4")), min_size=1, max_size=6))
    sizes = {"H200": 141 * GIB, "L4": 24 * GIB}
    num_models = draw(st.integers(1, 4))
    return Fleet(
        devices=tuple(
            DevicePlace(name=f"GPU {at}", kind=kind, memory_bytes=sizes[kind])
            for at, kind in enumerate(kinds)
        ),
        models=tuple(
            ModelNeed(
                name=ModelName(f"model-{at}"),
                num_devices=draw(st.sampled_from((1, 1, 2, 4))),
                weight_bytes=draw(st.integers(1, 160)) * GIB,
                context_bytes=draw(st.integers(0, 8)) * GIB,
                memory_share=draw(st.sampled_from((0.5, 0.92))),
            )
            for at in range(num_models)
        ),
        host_bytes=draw(st.integers(0, 400)) * GIB,
        num_agents=draw(st.one_of(st.none(), st.integers(1, 6))),
    )


@settings(max_examples=40, deadline=None)
@given(fleet=fleets())
def test_memory_is_never_exceeded_and_every_model_is_placed_or_named(fleet: Fleet):
    placement = place(fleet)
    models = {each.name: each for each in fleet.models}
    if not placement.agents:
        assert placement.misfits
        return
    used = [at for agent in placement.agents for at in agent.devices]
    assert len(used) == len(set(used))
    for agent in placement.agents:
        devices = [fleet.devices[at] for at in agent.devices]
        assert len({each.kind for each in devices}) == 1
        assert agent.first in agent.models
        for name in agent.models:
            model = models[name]
            assert model.num_devices <= len(devices)
            share = model.num_devices * devices[0].memory_bytes * model.memory_share
            assert model.need_bytes <= share + 1
    assert sum(agent.warm_bytes for agent in placement.agents) <= fleet.host_bytes
    assert set(models) == {name for agent in placement.agents for name in agent.models}
    if fleet.num_agents is not None:
        assert len(placement.agents) == fleet.num_agents


@settings(max_examples=15, deadline=None)
@given(fleet=fleets())
def test_equal_fleets_get_equal_placements(fleet: Fleet):
    assert place(fleet) == place(fleet)


@settings(max_examples=40, deadline=None)
@given(fleet=fleets())
def test_a_model_that_fits_no_devices_is_named_with_what_it_lacks(fleet: Fleet):
    placement = place(fleet)
    for model in fleet.models:
        shares = [model.num_devices * each.memory_bytes * 0.92 for each in fleet.devices]
        if model.need_bytes > max(shares):
            assert any(f"model {model.name} needs" in each for each in placement.misfits)
