"""Keys of tenants for the tests: real ones, in a store and under a key file of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from secrets import token_bytes
from tempfile import mkdtemp

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.adapters.keys.key_file import KeyFile
from services.adapters.keys.tenant_keys import KeyTimes, TenantKeys
from services.adapters.memory.store import MemoryStore
from services.adapters.record_cipher import RecordCipher
from services.core.errors import IntegrityError, KeyUnavailable
from services.core.records import TENANT_KEYS, TenantKeyring, load
from services.ports.clock import Clock
from services.ports.key_wrapper import KeyWrapper, Wrapped
from services.ports.store import Store
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer

SECRET = "the key of these tests, of 32 characters"


def key_file(*secrets: str) -> Path:
    """Return a file with these secrets, by default one."""
    path = Path(mkdtemp(prefix="keys")) / "record_keys"
    path.write_text("\n".join(secrets or (SECRET,)))
    return path


class FakeKms:
    """Implements ``KeyWrapper`` as a remote service does: it can be lost, slow, or refuse."""

    def __init__(self, *names: str) -> None:
        self.names = list(names or ("kms:1",))
        self.problem = ""
        self.delay_s = 0.0
        self.unwrapped = 0  # keys that were unwrapped
        self._keys = {name: AESGCM(token_bytes(32)) for name in self.names}

    def add(self, name: str) -> None:
        """Make a key, which wraps from now on."""
        self._keys[name] = AESGCM(token_bytes(32))
        self.names.insert(0, name)

    async def current(self) -> str:
        await self._answer()
        return self.names[0]

    async def wrap(self, key: bytes, context: str) -> Wrapped:
        await self._answer()
        name, nonce = self.names[0], token_bytes(12)
        return Wrapped(name, nonce + self._keys[name].encrypt(nonce, key, context.encode()))

    async def unwrap(self, wrapped: Wrapped, context: str) -> bytes:
        await self._answer()
        if wrapped.wrapper not in self._keys:
            raise KeyUnavailable("there is no such key")
        try:
            key = self._keys[wrapped.wrapper].decrypt(wrapped.data[:12], wrapped.data[12:], context.encode())
        except (InvalidTag, ValueError):
            raise IntegrityError("not authentic") from None
        self.unwrapped += 1
        return key

    async def _answer(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.problem:
            raise KeyUnavailable(self.problem, retry_after_s=1.0)


def ring_view(store: Store, clock: Clock) -> Informer[TenantKeyring]:
    """Return a view that is empty until its ``run``: keys are then read from the store."""
    return Informer(store, TENANT_KEYS, lambda entry: load(entry.value, TenantKeyring), clock)


def tenant_keys(
    store: Store | None = None,
    wrapper: KeyWrapper | None = None,
    clock: Clock | None = None,
    times: KeyTimes | None = None,
    view: Informer[TenantKeyring] | None = None,
) -> TenantKeys:
    clock = clock or SystemClock()
    store = store or MemoryStore(clock)
    return TenantKeys(
        store,
        view or ring_view(store, clock),
        wrapper or KeyFile(key_file(), token_bytes),
        clock,
        random_bytes=token_bytes,
        times=times or KeyTimes(),
    )


def record_cipher(*secrets: str, keys: TenantKeys | None = None) -> RecordCipher:
    """Return a cipher with keys of its own. ``secrets`` open chunks of version 1."""
    return RecordCipher(keys or tenant_keys(), token_bytes, secrets)
