"""Whether the signer policy of a model, as the store has it, lets a version be deployed and loaded."""

from __future__ import annotations

import asyncio
from typing import Final

from fairway.formats.signatures import Reason, SignerPolicy, distrust
from services.core.errors import FailedPrecondition, SignatureInvalid, SignatureMissing, SignerNotAllowed
from services.core.records import SIGNERS, Signatures, signatures_key
from services.ports.clock import Clock
from services.ports.store import Store

_ERRORS: Final[dict[Reason, type[FailedPrecondition]]] = {
    Reason.MISSING: SignatureMissing,
    Reason.NOT_ALLOWED: SignerNotAllowed,
    Reason.INVALID: SignatureInvalid,
}


class VersionTrust:
    """Policies and signatures are read from the store at each check, never from the blob store: who can write
    blobs alone can change neither.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def require(self, model: str, digest: str, *, base_model: str = "", base_digest: str = "") -> None:
        """Return if the version may be loaded, and the base of an adapter. Versions of a model without a
        policy may.

        Raises SignatureMissing, SignerNotAllowed, SignatureInvalid, StoreUnavailable.
        """
        stored = await self._store.get(SIGNERS + model)
        if stored is not None:
            policy = stored.load(SignerPolicy)
            signed = await self._store.get(signatures_key(model, digest))
            bundles = () if signed is None else signed.load(Signatures).bundles
            now_unix_s = self._clock.unix_s()
            found = await asyncio.to_thread(distrust, bundles, digest, policy, now_unix_s=now_unix_s)
            if found is not None:
                raise _ERRORS[found.reason](found.message, model=model, digest=digest)
        if base_digest:
            await self.require(base_model, base_digest)
