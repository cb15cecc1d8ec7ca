"""Requests of the fleet bench, and its expected outcomes."""

from ops.bench.fleet import CLASSES, KILLED, MODELS, body_of, predicted, workload


def test_equal_seeds_send_equal_requests():
    assert workload(1, rate_rps=5.0, duration_s=10.0) == workload(1, rate_rps=5.0, duration_s=10.0)
    assert workload(1, rate_rps=5.0, duration_s=10.0) != workload(2, rate_rps=5.0, duration_s=10.0)


def test_prompts_have_their_length_and_begin_differently():
    work = workload(0, rate_rps=50.0, duration_s=20.0)
    bodies = [body_of(number, each) for number, each in enumerate(work)]

    assert len({body.prompt[:2] for body in bodies}) == len(bodies)
    assert [len(body.prompt) for body in bodies] == [w.arrival.prompt_tokens for w in work]
    assert {body.model for body in bodies} == set(MODELS)


def test_every_request_has_an_expected_outcome():
    work = workload(0, rate_rps=4.0, duration_s=20.0)
    found = predicted(work, seed=0, kill_at_s=10.0)

    assert [each.class_name for each in found] == [each.arrival.class_name for each in work]
    assert {each.class_name for each in found} == {each.name for each in CLASSES}
    assert KILLED < 8
    assert all(each.attained for each in found)
