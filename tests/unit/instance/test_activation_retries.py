"""Pauses before a failed activation is retried."""

from solver.instance.state import MOST_PAUSE_S, ActivationRetries
from tests.queued import MODEL, OTHER


def test_each_failure_doubles_the_pause_up_to_a_minute():
    retries = ActivationRetries(first_pause_s=1.0)
    pauses_s = [retries.failed(MODEL, 0.0) for _ in range(8)]

    assert pauses_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MOST_PAUSE_S, MOST_PAUSE_S]
    assert retries.rests(MODEL, MOST_PAUSE_S - 0.1)
    assert not retries.rests(MODEL, MOST_PAUSE_S)


def test_another_model_is_tried_at_once_with_a_new_pause():
    retries = ActivationRetries(first_pause_s=1.0)
    for _ in range(3):
        retries.failed(MODEL, 0.0)
    assert not retries.rests(OTHER, 0.0)

    assert retries.failed(OTHER, 0.0) == 1.0
    assert not retries.rests(MODEL, 0.0)


def test_success_clears_the_failures():
    retries = ActivationRetries(first_pause_s=1.0)
    retries.failed(MODEL, 0.0)
    retries.succeeded(OTHER)
    assert retries.rests(MODEL, 0.5)
    retries.succeeded(MODEL)

    assert not retries.rests(MODEL, 0.5)
    assert retries.failed(MODEL, 0.5) == 1.0
