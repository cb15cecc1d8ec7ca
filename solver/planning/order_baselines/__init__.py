"""Plan generators to measure against: each makes a `QueueOrder` of a `PlanningProblem`."""
