"""Scenarios by name: each module has ``scenario(options)``, and its first line describes what it shows."""
