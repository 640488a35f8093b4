"""Speculative decoding: the proposers of tokens, and the part of the step that calls them."""
