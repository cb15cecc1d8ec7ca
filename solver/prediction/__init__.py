"""What will happen: latency, output lengths, completion times."""
