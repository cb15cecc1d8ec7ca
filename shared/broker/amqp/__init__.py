"""Implementation of `Broker` over RabbitMQ, with aio-pika."""
