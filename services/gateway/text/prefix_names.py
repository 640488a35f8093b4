"""The names of a prompt's prefix blocks, computed after tokenisation.

The root is keyed by a secret that all gateways share and by the tenant. So tenants share no cached prefix,
and no tenant can infer another's prompts from its time to first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

from services.core.generation import Prompt
from services.core.prefix import PREFIX_BLOCK_TOKENS, prefix_chain, prefix_root

# Up to this size naming takes less time than a thread switch under load: 0.2 ms; 100,000 tokens take 4 ms.
INLINE_TOKENS: Final = 64 * PREFIX_BLOCK_TOKENS


class PrefixNames:
    """Event loop only; long prompts run in the executor's threads."""

    def __init__(self, secret: bytes, executor: Executor) -> None:
        self._secret = secret
        self._executor = executor

    async def prompt(self, ids: Sequence[int], tenant_id: str, version_digest: str) -> Prompt:
        """Return the prompt with the names of its whole blocks."""
        root = prefix_root(self._secret, tenant_id, version_digest)
        if len(ids) < PREFIX_BLOCK_TOKENS:
            names: tuple[int, ...] = ()
        elif len(ids) <= INLINE_TOKENS:
            names = prefix_chain(root, ids)
        else:
            loop = asyncio.get_running_loop()
            names = await loop.run_in_executor(self._executor, prefix_chain, root, ids)
        return Prompt(ids, names, root)
