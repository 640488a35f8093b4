"""Nodes that a load needs, by recorded traces or rates, and the check of it against a simulated fleet."""
