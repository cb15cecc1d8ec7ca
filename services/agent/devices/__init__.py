"""GPUs of this machine: which there are, which are visible, and which agent has taken them."""
