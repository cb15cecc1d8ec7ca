"""`Broker` in one process: the semantics that Headway uses, without a server."""
