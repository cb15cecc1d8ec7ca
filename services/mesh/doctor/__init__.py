"""`headway doctor`: what about a broker deviates from what Headway needs, and what to do."""
