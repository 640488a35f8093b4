"""Structured output: what it costs, and that it holds."""
