"""Loads, scenarios, reports and comparisons of simulated fleets."""
