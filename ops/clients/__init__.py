"""The package for Python programs that use a mesh over AMQP."""
