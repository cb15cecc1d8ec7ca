"""Keeps the records of requests that ended recently, and answers questions about them."""
