"""Fingerprint of what a request computes, keyed by a secret of the installation.

A generation's covers the prompt and how its tokens are sampled. It leaves out what changes when a client
sends the same input again: the seed, and the limits of the output. A row's covers the tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import astuple, replace
from hashlib import blake2b
from typing import Final

from services.core.fixed_cost.rows import RawTensor
from services.core.generation import GenerationSpec

_BYTES: Final = 16


def fingerprint_of(spec: GenerationSpec, secret: bytes) -> str:
    """Return 32 hexadecimal digits. ``secret``: so that a stored fingerprint does not confirm a guess."""
    named = blake2b(digest_size=_BYTES, key=secret[:64])
    named.update(repr(astuple(replace(spec.sampling, seed=0))).encode())
    named.update(array("I", spec.prompt.ids).tobytes())
    return named.hexdigest()


def fingerprint_of_row(row: Sequence[RawTensor], secret: bytes) -> str:
    """Return the fingerprint of one row of a fixed-cost model, whatever request it came in."""
    named = blake2b(digest_size=_BYTES, key=secret[:64], person=b"row")
    for tensor in sorted(row, key=lambda tensor: tensor.name):
        named.update(repr((tensor.name, tensor.datatype, tensor.shape, len(tensor.data))).encode())
        named.update(tensor.data)
    return named.hexdigest()
