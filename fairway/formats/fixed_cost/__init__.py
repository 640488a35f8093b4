"""Models of which every request is one forward pass: which are served, by their small files."""
