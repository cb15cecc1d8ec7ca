"""`Broker` over RabbitMQ, with aio-pika."""
