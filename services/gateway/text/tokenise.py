"""Tokenises text in other processes than the event loop's, with a cache, and names the prompt's prefix
blocks.

The cache is per tenant: with a shared cache, a tenant could infer another's prompts from its time to the
first token. Its keys are digests, its size is counted in tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

from services.core.errors import PromptTooLong
from services.core.generation import Constraint, Prompt
from services.core.prefix import PREFIX_BLOCK_TOKENS, prefix_chain, prefix_root
from services.gateway.text.text_model import Conversation, TextModel, Texts, TokenRun

MAX_CACHED_TOKENS: Final = 500_000
MAX_CACHED_ENTRIES: Final = 4096
MAX_CHECKED: Final = 4096
MAX_CHECKED_CHARS: Final = 16 * 1024 * 1024
# Longer texts nearly always have more tokens than an entry may.
MAX_CACHED_BYTES: Final = 1024 * 1024
# Up to this size naming takes less time than a thread switch under load: 0.2 ms; 100,000 tokens take 4 ms.
INLINE_TOKENS: Final = 64 * PREFIX_BLOCK_TOKENS
# Up to this size a text is looked up before its request is admitted.
MAX_SHORT_CHARS: Final = 16 * 1024

Ids = tuple[int, ...]


class Tokeniser:
    """Owner of the cache. Event loop only; ``texts`` does the work."""

    def __init__(self, texts: Texts, *, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._texts = texts
        self._max_cached_tokens = max_cached_tokens
        self._cache: OrderedDict[bytes, Ids] = OrderedDict()
        self._cached_tokens = 0
        # Constraints that passed, as workers receive them.
        self._checked: OrderedDict[bytes, Constraint] = OrderedDict()
        self._checked_chars = 0

    async def check_constraint(self, model: TextModel, tenant_id: str, constraint: Constraint) -> Constraint:
        """Return the constraint for workers. Raises as ``Texts.check``."""
        key = _digest(model.version_digest, tenant_id, constraint.kind, constraint.source)
        if (kept := self._checked.get(key)) is not None:
            return kept
        found = await self._texts.check(model, tenant_id, constraint)
        if key not in self._checked:  # a request with the same one may have been faster
            self._checked[key] = found
            self._checked_chars += len(found.source)
        while len(self._checked) > MAX_CHECKED or self._checked_chars > MAX_CHECKED_CHARS:
            self._checked_chars -= len(self._checked.popitem(last=False)[1].source)
        return found

    async def prompt(self, model: TextModel, tenant_id: str, text: str) -> Ids:
        """Return the ids of a raw prompt.

        Raises PromptTooLong, by its bytes where they are more than ``max_prompt_bytes``, otherwise with its
        ``prompt_tokens``; and the errors of ``Texts.read``.
        """
        size = len(text.encode())
        _check_bytes(model, size, "prompt")
        if size > MAX_CACHED_BYTES:
            return await self._read(model, tenant_id, text, size)
        key = _digest(model.version_digest, tenant_id, "prompt", text)
        return self._cached(key) or self._keep(key, await self._read(model, tenant_id, text, size))

    async def chat(self, model: TextModel, tenant_id: str, chat: Conversation) -> Ids:
        """Return the ids of a conversation. Raises as ``prompt`` does."""
        texts = chat.texts()
        size = sum(len(text.encode()) for text in texts)
        _check_bytes(model, size, "messages")
        if model.depends_on_time or size > MAX_CACHED_BYTES:
            return await self._read(model, tenant_id, chat, size)
        key = _digest(model.version_digest, tenant_id, "chat", *texts)
        return self._cached(key) or self._keep(key, await self._read(model, tenant_id, chat, size))

    def known(self, model: TextModel, tenant_id: str, text: str | Conversation) -> Ids:
        """Return the cached ids of a short text; empty if it is longer or has none. Takes microseconds."""
        kind, *texts = ("prompt", text) if isinstance(text, str) else ("chat", *text.texts())
        if sum(map(len, texts)) > MAX_SHORT_CHARS or (model.depends_on_time and kind == "chat"):
            return ()
        return self._cached(_digest(model.version_digest, tenant_id, kind, *texts))

    async def decode(self, model: TextModel, tenant_id: str, ids: Sequence[int]) -> str:
        """Return the text of token ids, all within the vocabulary. Raises the errors of ``Texts.read``."""
        return await self._texts.decode(model, tenant_id, TokenRun(ids))

    def check_integrity(self) -> None:
        assert self._cached_tokens == sum(len(ids) for ids in self._cache.values())
        assert self._cached_tokens <= self._max_cached_tokens
        assert len(self._cache) <= MAX_CACHED_ENTRIES

    async def _read(self, model: TextModel, tenant_id: str, text: str | Conversation, size_bytes: int) -> Ids:
        tokens = await self._texts.read(model, tenant_id, text, size_bytes=size_bytes)
        if tokens.count > model.max_context_tokens:
            raise PromptTooLong(
                f"the prompt has {tokens.count} tokens, the context {model.max_context_tokens}",
                field="prompt" if isinstance(text, str) else "messages",
                prompt_tokens=tokens.count,
                max_context_tokens=model.max_context_tokens,
            )
        return tokens.ids

    def _cached(self, key: bytes) -> Ids:
        """Return the cached ids, empty without an entry."""
        found = self._cache.get(key)
        if found is None:
            return ()
        self._cache.move_to_end(key)
        return found

    def _keep(self, key: bytes, ids: Ids) -> Ids:
        if key not in self._cache and len(ids) <= self._max_cached_tokens // 4:
            self._cache[key] = ids
            self._cached_tokens += len(ids)
        while self._cached_tokens > self._max_cached_tokens or len(self._cache) > MAX_CACHED_ENTRIES:
            _, evicted = self._cache.popitem(last=False)
            self._cached_tokens -= len(evicted)
        return ids


class PrefixNames:
    """Computes the names of a prompt's prefix blocks. Event loop only; long prompts run in the executor's
    threads.

    The root is keyed by a secret that all gateways share and by the tenant. So tenants share no cached
    prefix, and no tenant can infer another's prompts from its time to first token.
    """

    def __init__(self, secret: bytes, executor: Executor) -> None:
        self._secret = secret
        self._executor = executor

    async def prompt(self, ids: Sequence[int], tenant_id: str, version_digest: str) -> Prompt:
        """Return the prompt with the names of its whole blocks."""
        if len(ids) <= INLINE_TOKENS:
            return self.short_prompt(ids, tenant_id, version_digest)
        root = prefix_root(self._secret, tenant_id, version_digest)
        loop = asyncio.get_running_loop()
        names = await loop.run_in_executor(self._executor, prefix_chain, root, ids)
        return Prompt(ids, names, root)

    def short_prompt(self, ids: Sequence[int], tenant_id: str, version_digest: str) -> Prompt:
        """The same at once, for at most ``INLINE_TOKENS``."""
        root = prefix_root(self._secret, tenant_id, version_digest)
        names = prefix_chain(root, ids) if len(ids) >= PREFIX_BLOCK_TOKENS else ()
        return Prompt(ids, names, root)


def _check_bytes(model: TextModel, size: int, field: str) -> None:
    if size > model.max_prompt_bytes:
        raise PromptTooLong(
            f"the {field} of {size} bytes is more than the {model.max_prompt_bytes} bytes that are read for "
            f"a context of {model.max_context_tokens} tokens",
            field=field,
            size_bytes=size,
            max_context_tokens=model.max_context_tokens,
            max_prompt_bytes=model.max_prompt_bytes,
        )


def _digest(*fields: str) -> bytes:
    """Return the name of a raw prompt, a conversation or a constraint in a cache."""
    digest = hashlib.sha256()
    for field in fields:
        data = field.encode()
        # The length prefix makes different lists of fields distinct.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
