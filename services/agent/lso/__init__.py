"""
LLM serving operations of the agent (QLM §5): how each is done, timed, counted and refused.

`solver.planning.lso_actions` says what is to be done when a plan changes; operators order the
same operations by command.
"""
