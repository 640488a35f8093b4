"""Requests over time: stages, placements and engine steps of one request on one clock."""
