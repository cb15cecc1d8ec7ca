"""
Estimator: learns costs from telemetry, and publishes them as versioned profiles.

Consumes: iterations, request observations, activations, statuses, routers' samples of prefills.
Publishes: profiles, alarms, and trees that its command `fit` has learnt from these samples.
Invariant: no component waits for the estimator; hot paths use the last profile received.
"""
