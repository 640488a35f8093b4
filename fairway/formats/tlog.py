"""A Merkle log as C2SP tlog-tiles lays it out: hashes of RFC 6962, tiles, bundles, signed checkpoints.

A tile of level L has up to 256 hashes of subtrees of 256**L entries; a bundle has the entries of a tile of
level 0. A tile with fewer is partial: its name contains how many it has. Sources: c2sp.org/tlog-tiles,
c2sp.org/tlog-checkpoint, c2sp.org/signed-note, RFC 6962 section 2.1.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

WIDTH: Final = 256
MAX_ENTRY_BYTES: Final = 65_535
CHECKPOINT: Final = "checkpoint"
_HASH_BYTES: Final = 32
_ED25519: Final = b"\x01"
_NOTE: Final = re.compile(r"([^\n]+)\n(0|[1-9][0-9]{0,18})\n([A-Za-z0-9+/=]{44})\n\n((?:— \S+ \S+\n)+)")
_EMPTY: Final = hashlib.sha256(b"").digest()


class LogDamaged(Exception):
    """The log is not the one that was signed, or does not extend an earlier one. The text names where."""


def leaf_hash(entry: bytes) -> bytes:
    return hashlib.sha256(b"\0" + entry).digest()


def root_of(hashes: Sequence[bytes]) -> bytes:
    """Return the hash of the tree over these subtrees; all but the last are full and equally large."""
    if len(hashes) == 1:
        return hashes[0]
    split = 1 << (len(hashes) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + root_of(hashes[:split]) + root_of(hashes[split:])).digest()


def tile_name(level: int | None, index: int, width: int = 0) -> str:
    """Return the name of a tile, or of a bundle for the level None. ``width`` is that of a partial one."""
    digits = f"{index % 1000:03}"
    while index := index // 1000:
        digits = f"x{index % 1000:03}/{digits}"
    folder = "entries" if level is None else str(level)
    return f"tile/{folder}/{digits}" + (f".p/{width}" if width else "")


def open_tiles(size: int) -> dict[int | None, str]:
    """Return the names of the partial tiles and the partial bundle of a log of this size, by level."""
    found: dict[int | None, str] = {}
    level = 0
    while size >> 8 * level:
        if width := (size >> 8 * level) % WIDTH:
            found[level] = tile_name(level, size >> 8 * (level + 1), width)
        level += 1
    if 0 in found:
        found[None] = tile_name(None, size // WIDTH, size % WIDTH)
    return found


def entries_of(bundle: bytes) -> list[bytes]:
    """Return the entries of a bundle. Raises LogDamaged."""
    found: list[bytes] = []
    at = 0
    while at < len(bundle):
        start = at + 2
        at = start + int.from_bytes(bundle[at:start], "big")
        if at > len(bundle) or start > len(bundle):
            raise LogDamaged("a bundle of entries is cut")
        found.append(bundle[start:at])
    return found


class Frontier:
    """The tiles at the right edge of a log, which further entries complete. One owner extends it."""

    def __init__(self, size: int = 0, tiles: Mapping[int | None, bytes] | None = None) -> None:
        """``tiles``: the contents of ``open_tiles(size)``. Raises LogDamaged for one of another length."""
        tiles = tiles or {}
        self.size = size
        self._entries = entries_of(tiles.get(None, b""))
        self._levels: list[list[bytes]] = []
        for level in range(-(-size.bit_length() // 8)):
            data = tiles.get(level, b"")
            if len(data) != (size >> 8 * level) % WIDTH * _HASH_BYTES:
                raise LogDamaged(f"the partial tile of level {level} has {len(data)} bytes")
            self._levels.append([data[at : at + _HASH_BYTES] for at in range(0, len(data), _HASH_BYTES)])
        if self._levels and list(map(leaf_hash, self._entries)) != self._levels[0]:
            raise LogDamaged("the entries of the partial bundle do not have the hashes of its tile")

    def root(self) -> bytes:
        """Return the hash of the tree."""
        root = b""
        for hashes in self._levels:
            if hashes or root:
                root = root_of([*hashes, root] if root else hashes)
        return root or _EMPTY

    def extend(self, entries: Sequence[bytes]) -> dict[str, bytes]:
        """Append entries; return the full tiles and bundles that they complete, by name."""
        full: dict[str, bytes] = {}
        for entry in entries:
            self._entries.append(entry)
            self.size += 1
            found, level = leaf_hash(entry), 0
            while True:
                if level == len(self._levels):
                    self._levels.append([])
                hashes = self._levels[level]
                hashes.append(found)
                if len(hashes) < WIDTH:
                    break
                index = (self.size >> 8 * (level + 1)) - 1
                full[tile_name(level, index)] = b"".join(hashes)
                if not level:
                    full[tile_name(None, index)], self._entries = bundle_of(self._entries), []
                found, self._levels[level], level = root_of(hashes), [], level + 1
        return full

    def partial(self) -> dict[str, bytes]:
        """Return the partial tiles and the partial bundle, by name."""
        return {
            name: bundle_of(self._entries) if level is None else b"".join(self._levels[level])
            for level, name in open_tiles(self.size).items()
        }


def bundle_of(entries: Sequence[bytes]) -> bytes:
    assert all(len(entry) <= MAX_ENTRY_BYTES for entry in entries), "an entry is too long for a bundle"
    return b"".join(len(entry).to_bytes(2, "big") + entry for entry in entries)


@dataclass(frozen=True, slots=True)
class TreeHead:
    """What a signed note states: a log's name, its size and the hash of its tree."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def verifier_of(seed: bytes, origin: str) -> str:
    """Return the public key of a signing key's 32 bytes as verifiers take it: name, hash and key."""
    public = _ED25519 + Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    return f"{origin}+{_key_hash(origin, public).hex()}+{base64.b64encode(public).decode()}"


def signed(checkpoint: TreeHead, seeds: Sequence[bytes]) -> str:
    """Return the checkpoint as a note with a signature by each of these keys."""
    lines = []
    for seed in seeds:
        key = Ed25519PrivateKey.from_private_bytes(seed)
        public = _ED25519 + key.public_key().public_bytes_raw()
        signature = _key_hash(checkpoint.origin, public) + key.sign(checkpoint.text.encode())
        lines.append(f"— {checkpoint.origin} {base64.b64encode(signature).decode()}\n")
    return f"{checkpoint.text}\n{''.join(lines)}"


def stated(note: str) -> TreeHead:
    """Return what a note states, whoever signed it. Raises LogDamaged."""
    found = _NOTE.fullmatch(note)
    if found is None:
        raise LogDamaged("the checkpoint is malformed")
    return TreeHead(found[1], int(found[2]), _decoded(found[3]))


def checkpoint_of(note: str, verifiers: Sequence[str]) -> TreeHead:
    """Return what a note states, signed by one of these keys. Raises LogDamaged."""
    checkpoint = stated(note)
    for line in note.rpartition("\n\n")[2].splitlines():
        _, name, signature = line.split(" ")
        if any(_signs(each, name, _decoded(signature), checkpoint) for each in verifiers):
            return checkpoint
    raise LogDamaged(
        f"the checkpoint of size {checkpoint.size} has no valid signature by {' or '.join(verifiers)}"
    )


def notes_of(text: str) -> list[str]:
    """Return the notes of a file to which checkpoints are appended. Raises LogDamaged."""
    found = [match[0] for match in _NOTE.finditer(text)]
    if "".join(found) != text:
        raise LogDamaged("the file of checkpoints has lines that belong to none")
    return found


def _signs(verifier: str, name: str, signature: bytes, checkpoint: TreeHead) -> bool:
    origin, key_hash, key = parse_verifier(verifier)
    if origin != name or origin != checkpoint.origin or signature[:4] != key_hash:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature[4:], checkpoint.text.encode())
    except InvalidSignature:
        return False
    return True


def parse_verifier(verifier: str) -> tuple[str, bytes, bytes]:
    """Return name, key hash and Ed25519 key of a verifier's text. Raises LogDamaged."""
    origin, _, rest = verifier.partition("+")
    key_hash, _, key = rest.partition("+")
    public = _decoded(key)
    if (
        len(public) != 1 + _HASH_BYTES
        or public[:1] != _ED25519
        or key_hash != _key_hash(origin, public).hex()
    ):
        raise LogDamaged(f"{verifier[:128]!r} is no Ed25519 key of a note: NAME+HASH+KEY")
    return origin, bytes.fromhex(key_hash), public[1:]


def _key_hash(origin: str, public: bytes) -> bytes:
    return hashlib.sha256(origin.encode() + b"\n" + public).digest()[:4]


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise LogDamaged(f"{text[:64]!r} is not base64") from None


def verify_log(
    read: Callable[[str], bytes | None], verifiers: Sequence[str], earlier: Sequence[str] = ()
) -> Iterator[tuple[TreeHead, list[bytes]]]:
    """Yield the checkpoint with each bundle's entries; once exhausted, the whole log is what was signed.

    ``read`` returns an object of the log, None for a missing one. Every entry is in the tree of the
    checkpoint, every tile has the hashes of its entries, and each of the ``earlier`` notes is of a beginning
    of this log. Raises LogDamaged, which names the first object that differs.
    """
    checkpoint = checkpoint_of(_present(read, CHECKPOINT).decode("utf-8", "replace"), verifiers)
    before = sorted((checkpoint_of(note, verifiers) for note in earlier), key=lambda one: one.size)
    if before and before[-1].size > checkpoint.size:
        raise LogDamaged(
            f"the log has {checkpoint.size} entries, an earlier checkpoint {before[-1].size}: its end was cut"
        )
    frontier = Frontier()
    while frontier.size < checkpoint.size:
        index, width = frontier.size // WIDTH, min(WIDTH, checkpoint.size - frontier.size)
        entries = _entries(read, index, width)
        at = 0
        while at < width:
            until = min(
                [one.size - frontier.size for one in before if one.size > frontier.size] + [width - at]
            )
            for name, data in frontier.extend(entries[at : at + until]).items():
                _require_same(read, name, data)
            at += until
            for one in before:
                if one.size == frontier.size:
                    _require_root(one, frontier.root(), "an earlier checkpoint")
        yield checkpoint, entries
    for name, data in frontier.partial().items():
        _require_same(read, name, data)
    _require_root(checkpoint, frontier.root(), "the checkpoint")


def _entries(read: Callable[[str], bytes | None], index: int, width: int) -> list[bytes]:
    name = tile_name(None, index, width % WIDTH)
    found = read(name)
    if found is None:
        name = tile_name(None, index)  # a partial bundle may be deleted once the full one is there
        found = _present(read, name)
    entries = entries_of(found)
    if len(entries) < width:
        raise LogDamaged(f"{name} has {len(entries)} of {width} entries")
    return entries[:width]


def _require_same(read: Callable[[str], bytes | None], name: str, data: bytes) -> None:
    found = read(name)
    if found is None and ".p/" in name:
        found = _present(read, name.partition(".p/")[0])[: len(data)]
    if found != data:
        raise LogDamaged(f"{name} is {'missing' if found is None else 'not what its entries hash to'}")


def _require_root(checkpoint: TreeHead, root: bytes, which: str) -> None:
    if checkpoint.root != root:
        raise LogDamaged(
            f"the first {checkpoint.size} entries are not those that {which} of that size was signed for"
        )


def _present(read: Callable[[str], bytes | None], name: str) -> bytes:
    found = read(name)
    if found is None:
        raise LogDamaged(f"{name} is missing")
    return found
