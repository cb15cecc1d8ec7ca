"""
Renewal: a request that is held for long is published again, before the broker takes it back.

RabbitMQ closes a channel with a delivery that is unacknowledged for longer than its setting
`consumer_timeout`, and delivers all messages of the channel again. So the instance publishes a copy
of the request, with its progress, to its own inbox. When the copy comes from there, it becomes the
request's delivery, and the earlier deliveries are acknowledged. The run continues meanwhile.

The broker has an unacknowledged message of the request at all times, so the request survives the
death of the process at any point. A copy whose request has left is acknowledged when it comes.
"""
