"""
Control of one serving instance as a state machine without IO: events in, commands out.

The agent uses only parts of it yet (sources, retries, totals, orders): `services.agent` still has
loops and state of its own.
"""
