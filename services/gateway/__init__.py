"""
The mesh's HTTP door: OpenAI-compatible requests in, answers out as JSON or server-sent events.

Consumes: HTTP; its own reply queue.
Publishes: requests to `headway.requests`; cancels and run stops to `headway.control`.
Invariant: a request that was not refused over HTTP is on the global queue, durably, exactly as
validated; each token that a client sees is sent once, and a client that leaves has its request
cancelled.
"""
