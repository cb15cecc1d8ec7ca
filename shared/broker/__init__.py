"""The message broker behind one protocol: RabbitMQ and an in-process implementation."""
