"""What a finished request waited for, and why it was late."""
