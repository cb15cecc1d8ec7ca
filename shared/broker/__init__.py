"""Message brokers behind one protocol: RabbitMQ and an in-process implementation."""
