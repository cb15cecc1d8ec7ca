"""
Agent: one per LLM serving instance. Pulls late, drives the engine, streams, executes LSOs.

Consumes: lanes and their companions (by `basic.get`), plans, control, profiles. Publishes: replies,
resumes, relegations, answers to operators, status and telemetry. Invariant: a delivery is
acknowledged only after its outcome (final reply, resume, relegation, dead letter) is confirmed.
"""
