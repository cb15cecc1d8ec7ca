"""Publishing requests to the mesh and following their replies, from any AMQP client."""
