"""Who is admitted where, and what is each tenant's share (QUARTZ)."""
