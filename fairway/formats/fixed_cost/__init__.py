"""Models that answer a request with one forward pass: which are served, by their small files."""
