"""One module per role: its function only builds the role from its parts."""
