"""What an agent counts by lane."""

from services.agent.state import Totals


def test_lanes_of_edges_long_replaced_are_forgotten():
    totals = Totals()
    queues = ["lane.1.m.low.3.short", "resume.1.m.3", "lane.1.m.low.3.short-1"]
    for number, queue in enumerate([*queues, *queues]):
        totals.pull(queue, float(number))
    assert totals.by_lane == dict.fromkeys(queues, 2)
    totals.pull("lane.1.m.low.3.long-5", 9.0)

    assert totals.by_lane == {queues[0]: 2, queues[1]: 2, "lane.1.m.low.3.long-5": 1}
    assert totals.pulled_to == {queues[0]: 3.0, queues[1]: 4.0, "lane.1.m.low.3.long-5": 9.0}
    assert totals.pulled == 7
