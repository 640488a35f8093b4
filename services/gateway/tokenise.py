"""Text into token ids, off the event loop and bounded: threads, waiting requests, cached tokens.

The cache is per tenant: with one for all, the time to the first token would tell a tenant what another
one sent. Its keys are digests, its size is counted in tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from services.core.errors import PromptTooLong, Unavailable
from services.gateway.chat_template import Message
from services.gateway.text_model import TextModel

MAX_PENDING: Final = 256
MAX_CACHED_TOKENS: Final = 500_000
MAX_CACHED_ENTRIES: Final = 4096
# Up to here tokenising takes less time than a thread switch under load does.
INLINE_BYTES: Final = 1024

Ids = tuple[int, ...]


class Tokeniser:
    """Owner of the cache. Event loop only; the work itself runs in the executor's threads."""

    def __init__(self, executor: Executor, *, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._executor = executor
        self._max_cached_tokens = max_cached_tokens
        self._cache: OrderedDict[bytes, Ids] = OrderedDict()
        self._cached_tokens = 0
        self._pending = 0

    async def prompt(self, model: TextModel, tenant_id: str, text: str) -> Ids:
        """Return the ids of a raw prompt. Raises PromptTooLong by its bytes alone where that is certain."""
        size = len(text.encode())
        _check_bytes(model, size, "prompt")
        if size <= INLINE_BYTES:
            return model.encode_prompt(text)
        key = _key(model.version_digest, tenant_id, "prompt", (text,))
        return await self._cached(key, lambda: model.encode_prompt(text))

    async def chat(self, model: TextModel, tenant_id: str, messages: Sequence[Message]) -> Ids:
        """Return the ids of a conversation. Raises as ``TextModel.encode_chat`` does."""
        _check_bytes(model, sum(len(message.content.encode()) for message in messages), "messages")
        if model.template is not None and model.template.depends_on_time:
            return await self._off_loop(lambda: model.encode_chat(messages))
        fields = [part for message in messages for part in (message.role, message.name, message.content)]
        key = _key(model.version_digest, tenant_id, "chat", fields)
        return await self._cached(key, lambda: model.encode_chat(messages))

    def check_integrity(self) -> None:
        assert self._cached_tokens == sum(len(ids) for ids in self._cache.values())
        assert self._cached_tokens <= self._max_cached_tokens
        assert len(self._cache) <= MAX_CACHED_ENTRIES
        assert 0 <= self._pending <= MAX_PENDING

    async def _cached(self, key: bytes, work: Callable[[], Ids]) -> Ids:
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        ids = await self._off_loop(work)
        if key not in self._cache and len(ids) <= self._max_cached_tokens // 4:
            self._cache[key] = ids
            self._cached_tokens += len(ids)
        while self._cached_tokens > self._max_cached_tokens or len(self._cache) > MAX_CACHED_ENTRIES:
            _, evicted = self._cache.popitem(last=False)
            self._cached_tokens -= len(evicted)
        return ids

    async def _off_loop(self, work: Callable[[], Ids]) -> Ids:
        if self._pending >= MAX_PENDING:
            raise Unavailable(f"{MAX_PENDING} prompts wait to be tokenised here", retry_after_s=1.0)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._pending -= 1


def _check_bytes(model: TextModel, size: int, field: str) -> None:
    if size > model.max_prompt_bytes:
        raise PromptTooLong(
            f"the {field} of {size} bytes cannot fit into the context of {model.max_context_tokens} tokens: "
            f"a token is at most {model.longest_token_bytes} bytes",
            field=field,
            size_bytes=size,
            max_context_tokens=model.max_context_tokens,
            longest_token_bytes=model.longest_token_bytes,
        )


def _key(version_digest: str, tenant_id: str, kind: str, fields: Sequence[str]) -> bytes:
    digest = hashlib.sha256()
    for field in (version_digest, tenant_id, kind, *fields):
        data = field.encode()
        # Lengths, so that no two lists of fields are one text.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
