"""The leader role: snapshot, plan, publish and report. Exactly one leader is active."""
