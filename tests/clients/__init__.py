"""A matrix of public clients against an installation: ``make clients``."""
