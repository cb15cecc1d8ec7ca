"""
Estimator: learns from telemetry what things cost, and publishes it as versioned profiles.

Consumes: iterations, request observations, activations, statuses, routers' samples of prefills.
Publishes: profiles, alarms, and trees that its command `fit` has made of those samples.
Invariant: nobody waits for it; hot paths evaluate the last profile they have.
"""
