"""
The leader role: makes plans, publishes the plans and explains them. Exactly one leader is active.
"""
