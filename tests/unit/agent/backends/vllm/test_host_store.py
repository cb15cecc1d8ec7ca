"""The worker's side of KV checkpoints: content and timing of copies."""

from threading import Event, Timer

import numpy as np

from services.agent.backends.vllm.kv.store import HostStore
from services.agent.backends.vllm.kv.transfers import Transfer, Transfers


def test_load_from_a_slot_never_filled_fails_and_changes_nothing() -> None:
    kv = np.full((4, 8), 7, dtype=np.uint8)
    store = HostStore(4, {"0": kv})
    store.carry_out(Transfers(step=1, saves=(Transfer(0, 0),)))
    store.carry_out(Transfers(step=2, loads=(Transfer(1, 0), Transfer(2, 3))))

    assert store.failed == {2}
    assert (kv == 7).all()
    assert store.totals.restored_blocks == 1


def test_repeated_iteration_copies_nothing_again() -> None:
    """When an iteration is repeated, a block saved before may belong to another request."""
    kv = np.full((2, 8), 7, dtype=np.uint8)
    store = HostStore(2, {"0": kv})
    transfers = Transfers(step=1, saves=(Transfer(0, 0),))
    store.carry_out(transfers)
    kv[0] = 9
    store.carry_out(transfers)
    store.carry_out(Transfers(step=2, loads=(Transfer(1, 0),)))

    assert (kv[1] == 7).all()


class GatedLayer(np.ndarray):
    """A layer's KV that is written only while its gate is open."""

    gate: Event

    def __setitem__(self, key: object, value: object) -> None:
        assert self.gate.wait(10)
        super().__setitem__(key, value)


class Gated:
    """A store of two layers: block 0, filled with 7s, is in slot 0, to be loaded as block 1."""

    def __init__(self) -> None:
        self.first, self.second = np.zeros((2, 2, 3), dtype=np.uint8)
        self.first[0] = self.second[0] = 7
        gated = self.second.view(GatedLayer)
        self.gate = gated.gate = Event()
        self.store = HostStore(2, {"first": self.first, "second": gated}, at_once_bytes=0)
        self.store.carry_out(Transfers(step=1, saves=(Transfer(0, 0),)))
        self.store.carry_out(Transfers(step=2, loads=(Transfer(1, 0),)))


def test_each_layer_is_waited_for_separately() -> None:
    gated = Gated()
    gated.store.wait_for("first")
    before = gated.first[1].tolist(), gated.second[1].tolist()
    gated.gate.set()
    gated.store.wait_for("second")
    gated.store.wait_for("of another group")

    assert before == ([7, 7, 7], [0, 0, 0])
    assert gated.second[1].tolist() == [7, 7, 7]


def test_iteration_ends_with_all_layers_loaded_and_counts_the_time() -> None:
    gated = Gated()
    Timer(0.01, gated.gate.set).start()
    gated.store.finish()

    assert gated.second[1].tolist() == [7, 7, 7]
    assert (gated.store.totals.restored_blocks, gated.store.totals.restored_bytes) == (1, 6)
    assert gated.store.totals.restore_s > 0


def test_no_block_is_saved_during_loads() -> None:
    gated = Gated()
    Timer(0.01, gated.gate.set).start()
    gated.store.carry_out(Transfers(step=3, saves=(Transfer(1, 1),)))
    gated.first[:] = gated.second[:] = 0
    gated.store.carry_out(Transfers(step=4, loads=(Transfer(0, 1),)))
    gated.store.finish()

    assert gated.second[0].tolist() == [7, 7, 7]
