"""
The mesh's HTTP interface: OpenAI-compatible requests, answers as JSON or server-sent events.

Consumes: HTTP; its own reply queue.
Publishes: requests to `headway.requests`; cancels and run stops to `headway.control`.
Invariant: a request that was not refused over HTTP is on the global queue, durably, exactly as
validated; each token that a client sees is sent once, and the request of a client that
disconnects is cancelled.
"""
