"""The engine process: plans, runs and commits steps of one language model. It alone imports torch."""
