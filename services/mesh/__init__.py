"""The whole mesh from one command: processes over RabbitMQ, or everything in one process."""
