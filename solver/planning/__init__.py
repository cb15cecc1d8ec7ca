"""Where work goes: lanes, groups, virtual queues (QLM §4)."""
