"""The leader role: makes plans, publishes them and explains them. Exactly one leader is active."""
