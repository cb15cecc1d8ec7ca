"""Stored responses of OpenAI's Responses API: background, streams to resume, conversations."""
