"""
Planner with two roles: the grouper moves requests from global queues to lanes, the leader plans.

Consumes: global queues, dead-letter replies, request observations (grouper); statuses, lane totals,
alarms (leader). Publishes: queued requests to lanes, lane totals, error finals (grouper); plans
(leader). Invariant: a request is acknowledged only after the broker has confirmed its publish to a
lane, or its error final and its dead letter.
"""
