"""A client of transparency logs, written from c2sp.org/tlog-tiles, tlog-checkpoint, signed-note and RFC 9162.

It imports nothing of Fairway. It gets the hashes of subtrees from tiles, computes proofs as a client of a
static log does, and verifies them by the algorithms of RFC 9162, sections 2.1.3.2 and 2.1.4.2.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

Fetch = Callable[[str], bytes | None]


class Rejected(Exception):
    pass


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class Client:
    def __init__(self, fetch: Fetch, verifier_key: str) -> None:
        self._fetch = fetch
        self._name, key_id, encoded = verifier_key.split("+", 2)
        self._key_id = bytes.fromhex(key_id)
        raw = base64.b64decode(encoded, validate=True)
        if raw[0] != 1 or hashlib.sha256(self._name.encode() + b"\n" + raw).digest()[:4] != self._key_id:
            raise Rejected("the verifier key is malformed")
        self._key = Ed25519PublicKey.from_public_bytes(raw[1:])

    def open_note(self, note: bytes) -> tuple[int, bytes]:
        """Return size and root of a checkpoint that the key signed."""
        text, _, signatures = note.decode().rpartition("\n\n")
        text += "\n"
        origin, size, root = text.split("\n")[:3]
        if origin != self._name or str(int(size)) != size or len(base64.b64decode(root)) != 32:
            raise Rejected("the checkpoint is malformed")
        for line in signatures.splitlines():
            dash, name, encoded = line.split(" ")
            signature = base64.b64decode(encoded, validate=True)
            if dash != "—" or name != self._name or signature[:4] != self._key_id:
                continue
            try:
                self._key.verify(signature[4:], text.encode())
            except InvalidSignature:
                raise Rejected("the signature is not valid") from None
            return int(size), base64.b64decode(root)
        raise Rejected("the key did not sign the checkpoint")

    def check(self, earlier: tuple[bytes, ...] = ()) -> list[bytes]:
        """Return all entries, each proved to be in the signed tree, which extends each earlier one."""
        note = self._fetch("checkpoint")
        if note is None:
            raise Rejected("there is no checkpoint")
        size, root = self.open_note(note)
        entries = self._entries(size)
        for index, entry in enumerate(entries):
            self._included(hashlib.sha256(b"\x00" + entry).digest(), index, size, root)
        for old in earlier:
            old_size, old_root = self.open_note(old)
            self._consistent(old_size, old_root, size, root)
        return entries

    # --- tiles ----------------------------------------------------------------------------------

    def _resource(self, kind: str, index: int, width: int) -> bytes:
        """Return a tile or a bundle; ``width`` is how many of its hashes or entries the tree has."""
        parts = [f"{index % 1000:03d}"]
        rest = index // 1000
        while rest:
            parts.insert(0, f"x{rest % 1000:03d}")
            rest //= 1000
        path = f"tile/{kind}/" + "/".join(parts)
        found = self._fetch(path if width == 256 else f"{path}.p/{width}")
        if found is None and width < 256:
            found = self._fetch(path)
        if found is None:
            raise Rejected(f"{path} is missing")
        return found

    def _entries(self, size: int) -> list[bytes]:
        entries: list[bytes] = []
        for index in range((size + 255) // 256):
            width = min(256, size - 256 * index)
            bundle, at = self._resource("entries", index, width), 0
            for _ in range(width):
                length = int.from_bytes(bundle[at : at + 2], "big")
                if at + 2 + length > len(bundle):
                    raise Rejected("a bundle is cut")
                entries.append(bundle[at + 2 : at + 2 + length])
                at += 2 + length
        return entries

    def _hash(self, height: int, index: int, size: int) -> bytes:
        """Return the hash of the full subtree of 2**height entries at an index, from its tile."""
        level, inside = divmod(height, 8)
        first = index << inside  # in hashes of the tile's level
        tile, at = divmod(first, 256)
        width = min(256, (size >> 8 * level) - 256 * tile)
        data = self._resource(str(level), tile, width)
        hashes = [data[32 * i : 32 * i + 32] for i in range(at, at + (1 << inside))]
        if any(len(each) != 32 for each in hashes):
            raise Rejected("a tile is cut")
        while len(hashes) > 1:
            hashes = [_node(hashes[i], hashes[i + 1]) for i in range(0, len(hashes), 2)]
        return hashes[0]

    def _range(self, start: int, end: int, size: int) -> bytes:
        """Return MTH(D[start:end]) for a start that is aligned to the range, as in all proofs."""
        count = end - start
        if count & (count - 1) == 0:
            height = count.bit_length() - 1
            return self._hash(height, start >> height, size)
        split = 1 << count.bit_length() - 1
        return _node(self._range(start, start + split, size), self._range(start + split, end, size))

    # --- proofs ---------------------------------------------------------------------------------

    def _path(self, index: int, start: int, end: int, size: int) -> list[bytes]:
        count = end - start
        if count == 1:
            return []
        split = 1 << (count - 1).bit_length() - 1
        if index < split:
            return [*self._path(index, start, start + split, size), self._range(start + split, end, size)]
        right = self._path(index - split, start + split, end, size)
        return [*right, self._range(start, start + split, size)]

    def _included(self, leaf: bytes, index: int, size: int, root: bytes) -> None:
        fn, sn, found = index, size - 1, leaf
        for each in self._path(index, 0, size, size):
            if sn == 0:
                raise Rejected("the proof is too long")
            if fn & 1 or fn == sn:
                found = _node(each, found)
                while fn and not fn & 1:
                    fn, sn = fn >> 1, sn >> 1
            else:
                found = _node(found, each)
            fn, sn = fn >> 1, sn >> 1
        if sn or found != root:
            raise Rejected(f"entry {index} is not in the signed tree")

    def _subproof(self, old: int, start: int, end: int, whole: bool, size: int) -> list[bytes]:
        count = end - start
        if old == count:
            return [] if whole else [self._range(start, end, size)]
        split = 1 << (count - 1).bit_length() - 1
        if old <= split:
            inner = self._subproof(old, start, start + split, whole, size)
            return [*inner, self._range(start + split, end, size)]
        inner = self._subproof(old - split, start + split, end, False, size)
        return [*inner, self._range(start, start + split, size)]

    def _consistent(self, old: int, old_root: bytes, size: int, root: bytes) -> None:
        if old > size:
            raise Rejected("the log is shorter than an earlier checkpoint")
        if old == size:
            if old_root != root:
                raise Rejected("the log was forked")
            return
        proof = self._subproof(old, 0, size, True, size)
        if old & (old - 1) == 0:
            proof.insert(0, old_root)
        fn, sn = old - 1, size - 1
        while fn & 1:
            fn, sn = fn >> 1, sn >> 1
        fr = sr = proof[0]
        for each in proof[1:]:
            if sn == 0:
                raise Rejected("the consistency proof is too long")
            if fn & 1 or fn == sn:
                fr, sr = _node(each, fr), _node(each, sr)
                while fn and not fn & 1:
                    fn, sn = fn >> 1, sn >> 1
            else:
                sr = _node(sr, each)
            fn, sn = fn >> 1, sn >> 1
        if fr != old_root or sr != root or sn:
            raise Rejected("the log does not extend an earlier checkpoint")
