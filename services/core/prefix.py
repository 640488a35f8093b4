"""Names of prompt prefixes: gateways compute them, workers cache by them, and the scheduler indexes them.

A name is a 64-bit hash over a whole prefix, block by block: ``name[i] = H(name[i - 1], tokens of block i)``.
The first is chained to a root that is keyed by a secret of the server and by the isolation domain, so that no
client can name or probe for blocks that another domain cached (RadixAttention and vLLM key their blocks in
the same way, without the secret). A name is never zero. Two prefixes have the same name with probability
2^-64 per pair.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

PREFIX_BLOCK_TOKENS: Final = 64
MAX_PREFIX_BLOCKS: Final = 4096


def prefix_root(secret: bytes, isolation_domain: str, version_digest: str) -> int:
    """Return the root of all prefixes of a domain on one version."""
    named = blake2b(digest_size=8, key=secret[:64])
    for part in (isolation_domain, version_digest):
        data = part.encode()
        named.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(named.digest(), "little") or 1


def extend(name: int, block: bytes) -> int:
    """Return the name of the prefix that ends with ``block``: token ids as little-endian 32-bit integers."""
    return (
        int.from_bytes(blake2b(block, digest_size=8, key=name.to_bytes(8, "little")).digest(), "little") or 1
    )


def prefix_chain(root: int, token_ids: Sequence[int], *, limit: int = MAX_PREFIX_BLOCKS) -> tuple[int, ...]:
    """Return the names of the whole blocks of a prompt, first to last, at most ``limit``."""
    blocks = min(len(token_ids) // PREFIX_BLOCK_TOKENS, limit)
    data = memoryview(array("I", token_ids[: blocks * PREFIX_BLOCK_TOKENS])).cast("B")
    size = 4 * PREFIX_BLOCK_TOKENS
    names: list[int] = []
    name = root
    for index in range(blocks):
        name = extend(name, bytes(data[index * size : (index + 1) * size]))
        names.append(name)
    return tuple(names)
