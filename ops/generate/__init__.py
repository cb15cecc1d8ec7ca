"""Generators of committed files: RabbitMQ definitions and the AsyncAPI document."""
