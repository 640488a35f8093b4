"""Key-encryption keys in a PKCS#11 token, such as a hardware security module. They never leave it.

Needs the package of the extra ``pkcs11``. The token encrypts with AES-GCM under AES keys that an operator
made in it, named by their labels: the first wraps, all unwrap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from services.adapters.threads import in_thread
from services.core.errors import IntegrityError, KeyUnavailable
from services.ports.key_wrapper import Wrapped
from services.runtime.config import ConfigError, read_password

try:
    import pkcs11 as binding
except ImportError:
    binding = None

T = TypeVar("T")
_NONCE_BYTES: Final = 12
_TAG_BITS: Final = 128
_NAME: Final = "pkcs11:"


class Pkcs11Keys:
    """``KeyWrapper`` on a token. Each call opens a session of its own, one at a time."""

    def __init__(
        self,
        module: Path,
        token: str,
        labels: Sequence[str],
        pin_file: Path,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        """``module``: the token's library. Raises ConfigError where the package or the library is missing."""
        if binding is None:
            raise ConfigError("FAIRWAY_KEY_MODULE needs python-pkcs11: install the extra fairway[pkcs11]")
        try:
            self._library = binding.lib(str(module))
        except (binding.PKCS11Error, RuntimeError) as error:
            raise ConfigError(f"FAIRWAY_KEY_MODULE {module} cannot be loaded: {error!r}") from error
        self._token = token
        self._labels = tuple(labels)
        self._pin_file = pin_file
        self._random_bytes = random_bytes
        self._lock = threading.Lock()

    async def current(self) -> str:
        return _NAME + self._labels[0]

    async def wrap(self, key: bytes, context: str) -> Wrapped:
        label, nonce = self._labels[0], self._random_bytes(_NONCE_BYTES)
        data = await in_thread(lambda: self._with_key(label, lambda held: _seal(held, nonce, key, context)))
        return Wrapped(_NAME + label, nonce + data)

    async def unwrap(self, wrapped: Wrapped, context: str) -> bytes:
        label = wrapped.wrapper.removeprefix(_NAME)
        if label not in self._labels:
            raise KeyUnavailable(
                f"no key {wrapped.wrapper} is configured: add its label to FAIRWAY_KEY_LABELS",
                retry_after_s=5.0,
                key=wrapped.wrapper,
            )
        return await in_thread(lambda: self._with_key(label, lambda held: _open(held, wrapped.data, context)))

    def _with_key(self, label: str, use: Callable[[Any], T]) -> T:
        try:
            with self._lock, self._session() as session:
                return use(session.get_key(key_type=binding.KeyType.AES, label=label))
        except (binding.PKCS11Error, ConfigError) as error:
            # A token that was taken out and put back is found by a library that starts over.
            with suppress(binding.PKCS11Error, AttributeError):
                self._library.reinitialize()
            raise KeyUnavailable(
                f"the token of keys failed: {type(error).__name__}", retry_after_s=5.0
            ) from error

    def _session(self) -> Any:
        return self._library.get_token(token_label=self._token).open(user_pin=read_password(self._pin_file))


def _seal(held: Any, nonce: bytes, key: bytes, context: str) -> bytes:
    return bytes(held.encrypt(key, mechanism=binding.Mechanism.AES_GCM, mechanism_param=_gcm(nonce, context)))


def _open(held: Any, data: bytes, context: str) -> bytes:
    nonce, sealed = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
    try:
        return bytes(
            held.decrypt(sealed, mechanism=binding.Mechanism.AES_GCM, mechanism_param=_gcm(nonce, context))
        )
    except (binding.exceptions.EncryptedDataInvalid, binding.exceptions.EncryptedDataLenRange):
        raise IntegrityError("a wrapped key is not authentic") from None


def _gcm(nonce: bytes, context: str) -> Any:
    return binding.GCMParams(nonce, context.encode(), _TAG_BITS)
