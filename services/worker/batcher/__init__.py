"""Fixed-cost models: single forward passes over batches of compatible requests."""
