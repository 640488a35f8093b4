"""vLLM behind Fairway beside bare vLLM, and what the executor promises."""
