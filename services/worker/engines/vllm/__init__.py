"""vLLM's workers as an executor of our engine: kernels, families, formats and ranks are vLLM's."""
