"""The first admin key, from a file: the initial access to an installation."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from services.core.errors import FailedPrecondition, StoreUnavailable, Unauthenticated
from services.core.records import KEYS, ApiKey, KeyRole, Meta, dump, load
from services.ports.clock import Clock
from services.ports.store import Committed, ModRevisionIs, Put, Store
from services.runtime import secrets

log = structlog.get_logger()
_TRIES: Final = 5
_MAX_FILE_BYTES: Final = 1024


async def bootstrap(store: Store, clock: Clock, admin_key_file: Path) -> str:
    """Return the name of the admin key in the file, whose hash is now stored.

    The file holds ``fw_<name>_<secret>`` and is authoritative: it replaces another secret under that name.
    Raises FailedPrecondition for a file that is missing, readable by others or without a key, and when the
    name is a tenant's key.
    """
    name, secret = _read(admin_key_file)
    hashed = secrets.secret_hash(secret)
    for _ in range(_TRIES):
        entry = await store.get(KEYS + name)
        now_s = clock.unix_s()
        if entry is None:
            key = ApiKey(Meta(name, create_unix_s=now_s, update_unix_s=now_s), KeyRole.ADMIN, hashed)
        else:
            old = load(entry.value, ApiKey)
            if old.role is not KeyRole.ADMIN:
                raise FailedPrecondition(f"key {name} in {admin_key_file.name} is a tenant's key", name=name)
            if old.secret_hash == hashed and not old.expire_unix_s:
                return name
            meta = replace(old.meta, update_unix_s=now_s)
            key = ApiKey(meta, KeyRole.ADMIN, hashed)
        condition = ModRevisionIs(KEYS + name, 0 if entry is None else entry.mod_revision)
        if isinstance(await store.commit([Put(KEYS + name, dump(key))], [condition]), Committed):
            log.info("key.bootstrapped", key=name)
            return name
    raise StoreUnavailable(f"key {name} is being changed by others")


def _read(path: Path) -> tuple[str, str]:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise FailedPrecondition(f"the admin key file {path.name} cannot be read: {exc.strerror}") from exc
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.geteuid(), 0):
        raise FailedPrecondition(f"the admin key file {path.name} is readable by others: chmod 600 it")
    try:
        return secrets.parse_key(data.decode("ascii").strip())
    except (Unauthenticated, UnicodeDecodeError) as exc:
        raise FailedPrecondition(
            f"the admin key file {path.name} holds no key of the form fw_<name>_<secret>"
        ) from exc
