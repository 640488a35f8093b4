"""The CUDA backend: attention and the steps between products in Triton, decode steps replayed from graphs."""
