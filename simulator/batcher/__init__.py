"""One batcher on a virtual clock, with measured costs of batches."""
