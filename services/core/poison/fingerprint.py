"""Fingerprint of what a request computes, keyed by a secret of the installation.

It covers the prompt and how its tokens are sampled. It leaves out what changes when a client sends the same
input again: the seed, and the limits of the output.
"""

from __future__ import annotations

from array import array
from dataclasses import astuple, replace
from hashlib import blake2b
from typing import Final

from services.core.generation import GenerationSpec

_BYTES: Final = 16


def fingerprint_of(spec: GenerationSpec, secret: bytes) -> str:
    """Return 32 hexadecimal digits. ``secret``: so that a stored fingerprint does not confirm a guess."""
    named = blake2b(digest_size=_BYTES, key=secret[:64])
    named.update(repr(astuple(replace(spec.sampling, seed=0))).encode())
    named.update(array("I", spec.prompt.ids).tobytes())
    return named.hexdigest()
