"""Values of fixed-cost models that several roles use."""
