"""Runs the whole mesh with one command: as processes over RabbitMQ, or in one process."""
