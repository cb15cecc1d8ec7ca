"""
LLM serving operations of the agent (QLM §5): execution, timing, metrics and refusals.

When a plan changes, `solver.planning.lso.actions` selects the operations. Operators order the same
operations by command.
"""
