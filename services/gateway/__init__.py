"""
The mesh's HTTP interface: OpenAI-compatible requests, answers as JSON or server-sent events.

Consumes: HTTP; its own reply queue.
Publishes: requests to `headway.requests`; cancellations and stops of runs to `headway.control`.
Invariant: a request that was not refused over HTTP is stored durably in the global queue, exactly
as validated. Each token is sent to the client once. When a client disconnects, its request is
cancelled.
"""
