"""The layout of the log, against a client that was written from the specification."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.formats.tlog import (
    Frontier,
    LogDamaged,
    TreeHead,
    bundle_of,
    entries_of,
    notes_of,
    open_tiles,
    parse_verifier,
    signed,
    tile_name,
    verifier_of,
    verify_log,
)
from tests.support.tlog_verifier import Client, Rejected

SEED: Final = hashlib.sha256(b"signing key").digest()
ORIGIN: Final = "log.example/audit"
VERIFIER: Final = verifier_of(SEED, ORIGIN)
Objects = dict[str, bytes]


def entry(index: int) -> bytes:
    return f"entry {index}".encode()


def written(sizes: Sequence[int]) -> tuple[Objects, list[str]]:
    """Return the objects of a log that had a checkpoint at each of these sizes, and the checkpoints."""
    objects: Objects = {}
    notes, frontier = [], Frontier()
    for size in sizes:
        tiles = {level: objects[name] for level, name in open_tiles(frontier.size).items()}
        frontier = Frontier(frontier.size, tiles)
        full = frontier.extend([entry(at) for at in range(frontier.size, size)])
        for name, data in {**full, **frontier.partial()}.items():
            assert objects.setdefault(name, data) == data, f"{name} was written twice"
        notes.append(signed(TreeHead(ORIGIN, size, frontier.root()), [SEED]))
    objects["checkpoint"] = notes[-1].encode()
    return objects, notes


def own_check(objects: Objects, earlier: Sequence[str] = ()) -> list[bytes]:
    return [each for _, entries in verify_log(objects.get, [VERIFIER], earlier) for each in entries]


BOUNDARIES: Final = st.sampled_from([1, 2, 3, 255, 256, 257, 511, 512, 513, 700])


@settings(max_examples=25, deadline=None)
@given(st.lists(BOUNDARIES, min_size=1, max_size=4, unique=True).map(sorted))
def test_a_client_from_the_specification_accepts_a_log_of_any_size(sizes: list[int]) -> None:
    objects, notes = written(sizes)
    entries = [entry(at) for at in range(sizes[-1])]
    assert Client(objects.get, VERIFIER).check(tuple(note.encode() for note in notes)) == entries
    assert own_check(objects, notes) == entries


def test_the_third_level_begins_at_65536_entries() -> None:
    objects, notes = written([65_535, 65_536, 65_537])
    assert own_check(objects, notes) == [entry(at) for at in range(65_537)]
    client = Client(objects.get, VERIFIER)
    size, root = client.open_note(objects["checkpoint"])
    for at in (0, 255, 256, 65_535, 65_536):
        client._included(hashlib.sha256(b"\0" + entry(at)).digest(), at, size, root)
    for note in notes:
        client._consistent(*client.open_note(note.encode()), size, root)
    assert {name for name in objects if name.startswith("tile/2")} == {"tile/2/000.p/1"}


def test_the_specification_s_example_has_its_tiles() -> None:
    assert open_tiles(70_000) == {
        0: "tile/0/273.p/112",
        1: "tile/1/001.p/17",
        2: "tile/2/000.p/1",
        None: "tile/entries/273.p/112",
    }
    assert open_tiles(256) == {1: "tile/1/000.p/1"}
    assert tile_name(0, 1_234_067) == "tile/0/x001/x234/067"


def _change_entry(objects: Objects) -> None:
    objects["tile/entries/000"] = objects["tile/entries/000"].replace(b"entry 7", b"entry X", 1)


def _change_entry_and_tile(objects: Objects) -> None:
    _change_entry(objects)
    leaf = hashlib.sha256(b"\0entry X").digest()
    tile = objects["tile/0/000"]
    objects["tile/0/000"] = tile[: 7 * 32] + leaf + tile[8 * 32 :]


def _reorder_tile(objects: Objects) -> None:
    for name in ("tile/0/00{}", "tile/entries/00{}"):
        objects[name.format(0)], objects[name.format(1)] = objects[name.format(1)], objects[name.format(0)]


def _reorder_within(objects: Objects) -> None:
    found = entries_of(objects["tile/entries/001"])
    objects["tile/entries/001"] = bundle_of([found[1], found[0], *found[2:]])


def _cut_tail(objects: Objects) -> None:
    objects.update(written([520])[0])


def _cut_bundle(objects: Objects) -> None:
    objects["tile/entries/002.p/38"] = objects["tile/entries/002.p/38"][:-1]


def _forge(objects: Objects) -> None:
    other = Frontier()
    other.extend([b"forged"] * 550)
    forged = TreeHead(ORIGIN, 550, other.root())
    objects["checkpoint"] = signed(forged, [hashlib.sha256(b"another key").digest()]).encode()


def _forge_root(objects: Objects) -> None:
    note = objects["checkpoint"].decode().split("\n")
    note[2] = signed(TreeHead(ORIGIN, 1, b"\1" * 32), [SEED]).split("\n")[2]
    objects["checkpoint"] = "\n".join(note).encode()


def _fork(objects: Objects) -> None:
    """The whole log is written again, with another entry, by whoever has the key."""
    frontier = Frontier()
    full = frontier.extend([b"rewritten" if at == 3 else entry(at) for at in range(550)])
    objects.update({**full, **frontier.partial()})
    objects["checkpoint"] = signed(TreeHead(ORIGIN, 550, frontier.root()), [SEED]).encode()


@pytest.mark.parametrize(
    "damage",
    [
        _change_entry,
        _change_entry_and_tile,
        _reorder_tile,
        _reorder_within,
        _cut_tail,
        _cut_bundle,
        _forge,
        _forge_root,
        _fork,
    ],
)
def test_both_clients_reject(damage: Callable[[Objects], None]) -> None:
    objects, notes = written([300, 540, 550])
    damage(objects)
    with pytest.raises(Rejected):
        Client(objects.get, VERIFIER).check(tuple(note.encode() for note in notes))
    with pytest.raises(LogDamaged):
        own_check(objects, notes)


@pytest.mark.parametrize("name", ["tile/0/001", "tile/1/000.p/2", "tile/0/002.p/38"])
def test_a_changed_tile_is_named(name: str) -> None:
    objects, _ = written([550])
    objects[name] = objects[name][:-1] + bytes([objects[name][-1] ^ 1])
    with pytest.raises(LogDamaged, match=name):
        own_check(objects)


def test_partial_tiles_may_be_gone_once_the_full_ones_are_there() -> None:
    objects, notes = written([250, 256, 300])
    for name in [name for name in objects if name.startswith(("tile/0/000.p", "tile/entries/000.p"))]:
        del objects[name]
    assert len(own_check(objects, notes)) == 300
    objects["checkpoint"] = notes[0].encode()  # a reader that has an older checkpoint
    assert len(own_check(objects)) == 250


def test_two_keys_sign_and_either_verifies() -> None:
    objects, _ = written([3])
    new = hashlib.sha256(b"new key").digest()
    size, root = Client(objects.get, VERIFIER).open_note(objects["checkpoint"])
    objects["checkpoint"] = signed(TreeHead(ORIGIN, size, root), [new, SEED]).encode()
    for verifier in (VERIFIER, verifier_of(new, ORIGIN)):
        assert len(Client(objects.get, verifier).check()) == 3
        assert len([*verify_log(objects.get, [verifier])]) == 1


def test_appended_checkpoints_are_read_one_by_one() -> None:
    _, notes = written([1, 2, 300])
    assert notes_of("".join(notes)) == notes
    with pytest.raises(LogDamaged, match="belong to none"):
        notes_of(notes[0] + "garbage\n")
    for wrong in ("", "a+b", "log+00000000+" + VERIFIER.rpartition("+")[2]):
        with pytest.raises(LogDamaged):
            parse_verifier(wrong)
