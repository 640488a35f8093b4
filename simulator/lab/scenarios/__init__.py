"""Scenarios by name: each module has ``scenario(options)``, and its first line says what it shows."""
