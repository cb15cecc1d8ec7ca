"""
Agent: the service that drives one LLM serving instance.

The agent pulls requests as late as possible, runs them on the engine, streams their tokens and
executes LLM serving operations (LSOs).

Consumes: lanes and their companions (by `basic.get`), plans, control, profiles. Publishes: replies,
resumes, relegations, answers to operators, status and telemetry. Invariant: a delivery is
acknowledged only after its outcome (final reply, resume, relegation, dead letter) is confirmed.
"""
