"""Traces of requests: spans of services, their attributes, and their export by OTLP."""
