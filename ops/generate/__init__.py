"""Generators of committed files: RabbitMQ definitions, the AsyncAPI document, cases."""
