"""The port through which the gateway has texts read by a version's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.gateway.text.text_model import Message, TextModel

# Lends the folder of a version's verified files.
OpenFolder = Callable[[], AbstractAsyncContextManager[Path]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a text became. ``ids`` is empty where ``count`` is more than the model's context."""

    count: int
    ids: tuple[int, ...]


class Texts(Protocol):
    async def load(self, version_digest: str, folder: OpenFolder) -> TextModel:
        """Return what a version's files say; its texts can be read from then on.

        Raises FailedPrecondition for files that cannot be used, Unavailable, and what ``folder`` raises.
        """

    def unload(self, version_digest: str) -> None:
        """Give up what a version holds."""

    async def read(
        self, model: TextModel, tenant_id: str, text: str | Sequence[Message], *, size_bytes: int
    ) -> Tokens:
        """Return the tokens of a prompt or of a conversation, which holds ``size_bytes`` of text.

        Raises InvalidInput (PromptTooLong, UnsupportedFeature) for what the version does not take,
        FailedPrecondition where its files fail on it, Unavailable where a retry may help.
        """
