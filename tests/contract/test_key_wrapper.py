"""What every ``KeyWrapper`` does, checked on a key file, on a PKCS#11 token and on the fake of the tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes

import pytest

from services.adapters.keys.key_file import KeyFile
from services.adapters.keys.pkcs11 import Pkcs11Keys
from services.core.errors import IntegrityError, KeyUnavailable
from services.ports.key_wrapper import KeyWrapper, Wrapped
from tests.support.tenant_keys import FakeKms

KEY = token_bytes(32)
MODULE = Path("/usr/lib/softhsm/libsofthsm2.so")
HAS_TOKEN = MODULE.exists() and importlib.util.find_spec("pkcs11") is not None
Make = Callable[..., KeyWrapper]


@dataclass(frozen=True, slots=True)
class Place:
    """A place of key-encryption keys that can be lost. ``make`` returns a wrapper that has the keys named."""

    make: Make
    lose: Callable[[], None]


def _file(folder: Path) -> Place:
    path = folder / "record_keys"

    def make(*names: str) -> KeyWrapper:
        path.write_text("\n".join(name * 16 for name in names))
        return KeyFile(path, token_bytes)

    return Place(make, path.unlink)


def _token(folder: Path) -> Place:
    import pkcs11

    pin = folder / "pin"
    pin.write_text("1234")
    library = pkcs11.lib(str(MODULE))
    with library.get_token(token_label="fairway").open(rw=True, user_pin="1234") as session:
        for label in ("k1", "k2"):
            session.generate_key(pkcs11.KeyType.AES, 256, label=label, store=False)
            if not list(session.get_objects({pkcs11.Attribute.LABEL: f"{label}-kept"})):
                session.generate_key(pkcs11.KeyType.AES, 256, label=f"{label}-kept", store=True)

    def make(*names: str) -> KeyWrapper:
        return Pkcs11Keys(MODULE, "fairway", [f"{name}-kept" for name in names], pin, token_bytes)

    return Place(make, pin.unlink)


def _fake(_: Path) -> Place:
    kms = FakeKms("k1")

    def make(*names: str) -> KeyWrapper:
        for name in reversed(names):
            if name not in kms.names:
                kms.add(name)
        return kms

    def lose() -> None:
        kms.problem = "the service of keys is not reachable"

    return Place(make, lose)


@pytest.fixture(scope="session")
def softhsm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A token in a folder of its own; the library reads its configuration once in a process."""
    folder = tmp_path_factory.mktemp("softhsm")
    (folder / "tokens").mkdir()
    config = folder / "softhsm2.conf"
    config.write_text(f"directories.tokendir = {folder / 'tokens'}\n")
    os.environ["SOFTHSM2_CONF"] = str(config)
    tool = shutil.which("softhsm2-util")
    assert tool is not None
    init = [tool, "--init-token", "--free", "--label", "fairway", "--pin", "1234", "--so-pin", "5678"]
    subprocess.run(init, check=True, capture_output=True, timeout=30)


@pytest.fixture(
    params=[
        "file",
        "fake",
        pytest.param(
            "token",
            marks=pytest.mark.skipif(
                not HAS_TOKEN, reason="no PKCS#11 token here: install softhsm2 and python-pkcs11"
            ),
        ),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "token":
        request.getfixturevalue("softhsm")
    found: Place = {"file": _file, "fake": _fake, "token": _token}[request.param](tmp_path)
    return found


async def test_a_key_unwraps_to_what_it_was_and_is_not_in_what_is_stored(place: Place) -> None:
    wrapper = place.make("k1")
    first, second = await wrapper.wrap(KEY, "acme/1"), await wrapper.wrap(KEY, "acme/1")
    assert first.wrapper == await wrapper.current()
    assert first.data != second.data
    assert KEY not in first.data
    assert await wrapper.unwrap(first, "acme/1") == await wrapper.unwrap(second, "acme/1") == KEY


async def test_another_context_and_changed_bytes_do_not_unwrap(place: Place) -> None:
    wrapper = place.make("k1")
    wrapped = await wrapper.wrap(KEY, "acme/1")
    changed = Wrapped(wrapped.wrapper, wrapped.data[:-1] + bytes([wrapped.data[-1] ^ 1]))
    for each, context in (
        (wrapped, "acme/2"),
        (changed, "acme/1"),
        (Wrapped(wrapped.wrapper, b""), "acme/1"),
    ):
        with pytest.raises((IntegrityError, KeyUnavailable)):
            await wrapper.unwrap(each, context)
    assert await wrapper.unwrap(wrapped, "acme/1") == KEY


async def test_a_new_key_wraps_and_the_former_one_unwraps(place: Place) -> None:
    before = await place.make("k1").wrap(KEY, "c")
    wrapper = place.make("k2", "k1")
    after = await wrapper.wrap(KEY, "c")
    assert after.wrapper == await wrapper.current() != before.wrapper
    assert await wrapper.unwrap(before, "c") == await wrapper.unwrap(after, "c") == KEY


async def test_a_key_that_is_not_there_is_unavailable(place: Place) -> None:
    with pytest.raises(KeyUnavailable):
        await place.make("k1").unwrap(Wrapped("none", b"x" * 60), "c")


async def test_a_lost_place_of_keys_is_unavailable(place: Place) -> None:
    wrapper = place.make("k1")
    wrapped = await wrapper.wrap(KEY, "c")
    place.lose()
    with pytest.raises(KeyUnavailable):
        await wrapper.unwrap(wrapped, "c")
    with pytest.raises(KeyUnavailable):
        await wrapper.wrap(KEY, "c")
