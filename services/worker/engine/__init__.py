"""The engine process: plans, runs and commits steps of one language model. The only place that imports torch."""
