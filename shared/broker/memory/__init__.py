"""In-process implementation of `Broker`: the semantics that Headway uses, without a server."""
