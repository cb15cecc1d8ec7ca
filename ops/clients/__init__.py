"""Packages for programs that use a mesh over AMQP, for Python and JavaScript."""
