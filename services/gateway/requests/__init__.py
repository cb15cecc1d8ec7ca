"""Requests whose ids mean something: repeats, answers that are collected later, status."""
