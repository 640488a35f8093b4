"""A day of one pool: arrivals, a request-level model of its replicas, scalers and what they cost."""
