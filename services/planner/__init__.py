"""
Planner: takes requests from the global queue into lanes (grouper), and plans (leader).

Consumes: global queues, dead-letter replies, request observations (grouper); statuses, lane
totals, alarms (leader). Publishes: queued requests to lanes, lane totals, error finals (grouper);
plans (leader). Invariant: a request is acknowledged only after it is confirmed in a lane, or after
its error final and its dead letter are.
"""
