"""Alarms about instances that are slower than their peers."""
