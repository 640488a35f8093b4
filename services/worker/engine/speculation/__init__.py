"""Speculative decoding: who proposes tokens, and the part of the step that asks for them."""
