"""
LLM serving operations of the agent (QLM §5): execution, timing, metrics and refusals.

`solver.planning.lso.actions` selects the operations when a plan changes; operators order the
same operations by command.
"""
