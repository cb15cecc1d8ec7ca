"""
Estimator: learns from telemetry what things cost, and publishes it as versioned profiles.

Consumes: iterations, request observations, activations, statuses. Publishes: profiles, alarms.
Invariant: nobody waits for it; hot paths evaluate the last profile they have.
"""
