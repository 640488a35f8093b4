"""The port for encoding texts by a version's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.gateway.text.text_model import Message, TextModel

# Provides the folder of a version's verified files.
OpenFolder = Callable[[], AbstractAsyncContextManager[Path]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text. ``ids`` is empty where ``count`` is more than the model's context."""

    count: int
    ids: tuple[int, ...]


class Texts(Protocol):
    async def load(self, version_digest: str, folder: OpenFolder) -> TextModel:
        """Return the text facts of a version; its texts can be read from then on.

        Raises FailedPrecondition for unusable files, Unavailable, and the errors of ``folder``.
        """

    def unload(self, version_digest: str) -> None:
        """Release a version's resources."""

    async def read(
        self, model: TextModel, tenant_id: str, text: str | Sequence[Message], *, size_bytes: int
    ) -> Tokens:
        """Return the tokens of a prompt or of a conversation with ``size_bytes`` of text.

        Raises InvalidInput (PromptTooLong, UnsupportedFeature) for text that the version does not accept,
        FailedPrecondition where its files fail on it, Unavailable where a retry may help.
        """
