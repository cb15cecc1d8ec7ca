"""Publishes requests to the mesh and receives their replies, for any AMQP client."""
