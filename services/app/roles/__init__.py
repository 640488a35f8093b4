"""One module per role: its function builds the role from its parts, and does nothing else."""
