"""What an agent reports about its instance and about its requests; losses are harmless."""
