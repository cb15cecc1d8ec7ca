"""Assignment of work to instances: lanes, groups, virtual queues (QLM §4)."""
