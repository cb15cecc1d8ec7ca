"""Programs that use a running mesh; they need `aio-pika` only."""
