"""Signatures of versions, and who may sign the versions of a model: records in the store."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from fairway.formats.signatures import MAX_BUNDLES, BadSignature, SignerPolicy, check_policy, claim_of
from services.core.errors import (
    Conflict,
    EtagMismatch,
    FailedPrecondition,
    InvalidInput,
    ModelNotFound,
    NotFound,
    SignatureInvalid,
)
from services.core.records import SIGNERS, Signatures, dump, signatures_key, version_key
from services.ports.store import Committed, Delete, Entry, ModRevisionIs, Put, Store
from services.runtime.idempotent_writes import RequestLog, WriteAnswer, WriteRequest, WriteSet, fingerprint_of

log = structlog.get_logger()
_TRIES: Final = 5  # attempts of a commit that conflicts with others


class VersionSignatures:
    """Stateless; conditional writes in the store resolve conflicts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._requests = RequestLog(store)

    async def of(self, model: str, digest: str) -> tuple[str, ...]:
        """Return the bundles of a version, in the order in which they were added."""
        return _bundles_in(await self._store.get(signatures_key(model, digest)))

    async def add(self, model: str, digest: str, bundle: str) -> bool:
        """Return whether the version has a new signature; False: it has this one already.

        Raises SignatureInvalid for a bundle that is malformed or of another version, ModelNotFound,
        FailedPrecondition for more than a version may have. Who may sign is decided at each load.
        """
        try:
            claim = claim_of(bundle, digest)
        except BadSignature as error:
            raise SignatureInvalid(str(error), field="bundle") from error
        key = signatures_key(model, digest)
        for _ in range(_TRIES):
            version = await self._store.get(version_key(model, digest))
            if version is None:
                raise ModelNotFound(f"{model} has no version {digest}", model=model, digest=digest)
            entry = await self._store.get(key)
            bundles = _bundles_in(entry)
            if bundle in bundles:
                return False
            if len(bundles) >= MAX_BUNDLES:
                raise FailedPrecondition(f"{digest} has {MAX_BUNDLES} signatures, the most of a version")
            conditions = [ModRevisionIs(version.key, version.mod_revision), _unchanged(key, entry)]
            write = Put(key, dump(Signatures((*bundles, bundle))))
            if isinstance(await self._store.commit([write], conditions), Committed):
                log.info("signature.added", model=model, digest=digest, signer=claim.name)
                return True
        raise Conflict(f"signatures of {digest} are being added by others: try again", digest=digest)

    async def policy(self, model: str) -> tuple[SignerPolicy, str]:
        """Return the signer policy of a model and its etag. Raises NotFound where it has none."""
        entry = await self._store.get(SIGNERS + model)
        if entry is None:
            raise NotFound(f"{model} has no signer policy: any version of it may be loaded", model=model)
        return entry.load(SignerPolicy), str(entry.mod_revision)

    async def update_policy(self, policy: SignerPolicy, *, etag: str = "", request_id: str = "") -> str:
        """Replace the policy of a model, or remove it where it names no signer, and return the new etag.

        Raises InvalidInput for one that cannot be applied, EtagMismatch.
        """
        try:
            await asyncio.to_thread(check_policy, policy)
        except BadSignature as error:
            raise InvalidInput(str(error), field="policy") from error
        key, content = SIGNERS + policy.model, dump(policy)
        request = WriteRequest("signerpolicy", request_id, fingerprint_of("update", content, etag))
        if (before := await self._requests.answered(request)) is not None:
            return str(before.revision)
        entry = await self._store.get(key)
        if etag and etag != str(0 if entry is None else entry.mod_revision):
            raise EtagMismatch("the signer policy has changed: read it again", etag=etag)
        write = Put(key, content) if policy.signers else Delete(key)
        change = WriteSet([_unchanged(key, entry)], [write])
        done = await self._requests.commit(change, request, WriteAnswer())
        if not isinstance(done, Committed):
            raise Conflict("the signer policy is being changed by others: try again", model=policy.model)
        log.info("signer_policy.updated", model=policy.model, signers=[one.name for one in policy.signers])
        return str(done.revision)


def _bundles_in(entry: Entry | None) -> tuple[str, ...]:
    return () if entry is None else entry.load(Signatures).bundles


def _unchanged(key: str, entry: Entry | None) -> ModRevisionIs:
    return ModRevisionIs(key, 0 if entry is None else entry.mod_revision)
