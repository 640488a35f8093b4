"""The text facts of a model version, and the port that encodes texts by its tokenizer and chat template.

The tokenizer and template run in separate processes: see ``text/``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from fairway.formats.answers import ToolCall
from fairway.formats.version_files import GATEWAY_FILES
from services.core.fixed_cost.signature import Signature
from services.core.generation import Constraint
from services.core.outputs.forms import OutputForm, Tool
from services.gateway.outputs.forms import MarkToken

# Size that takes about 4 s of a text process at most, which delays no other client: see ``text/child.py``.
MIN_PROMPT_BYTES: Final = 1024 * 1024


def is_text_file(path: str) -> bool:
    """Return whether the gateway reads this file of a version."""
    return path in GATEWAY_FILES


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn, as the client sent it."""

    role: str
    content: str
    name: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning_content: str = ""

    def texts(self) -> tuple[str, ...]:
        """Return every text of the turn, in an order that distinguishes turns."""
        calls = [text for call in self.tool_calls for text in (call.id, call.name, call.arguments)]
        own = (self.role, self.name, self.content, self.tool_call_id, self.reasoning_content)
        return (*own, str(len(self.tool_calls)), *calls)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, further variables of the chat template as a JSON object (empty: none), and tools."""

    messages: Sequence[ChatMessage]
    variables: str = ""
    tools: Sequence[Tool] = ()

    def texts(self) -> tuple[str, ...]:
        """Return every text, in an order that distinguishes conversations."""
        tools = (text for tool in self.tools for text in (tool.name, tool.description, tool.parameters))
        turns = (text for message in self.messages for text in message.texts())
        return (self.variables, str(len(self.tools)), *tools, *turns)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The defaults of a version's generation_config.json; otherwise the neutral values of ``Sampling``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text facts from one version's files."""

    version_digest: str
    vocab_size: int
    max_context_tokens: int
    longest_token_bytes: int
    defaults: SamplingDefaults
    # Whether the chat template reads the clock.
    depends_on_time: bool
    # Whether the chat template takes the variable ``guideline``.
    is_guided: bool = False
    # Why the chat template renders no conversation, so that the version takes prompts only.
    template_fault: str = ""
    # Inputs and outputs of a fixed-cost model; None: the version generates text.
    signature: Signature | None = None
    # Signature of a decoder whose files declare an embedding.
    embedding: Signature | None = None
    # How its outputs write reasoning and calls, as far as its files show.
    form: OutputForm = field(default_factory=OutputForm)
    # The tokens of its tokenizer that spell a part of a form.
    marks: tuple[MarkToken, ...] = ()
    # Ends of a prompt that open the reasoning of a form: the text that opens it, and token ids.
    openings: tuple[tuple[str, tuple[int, ...]], ...] = ()
    weights_digest: str = ""  # digest of the weights; an adapter has that of its base
    base_digest: str = ""  # version that an adapter changes; empty: the version is none

    @property
    def of_rows(self) -> TextModel:
        """The same version as rows see it: a decoder that embeds has a signature, and its most tokens."""
        if self.embedding is None:
            return self
        return replace(self, signature=self.embedding, max_context_tokens=self.embedding.max_tokens)

    @property
    def max_prompt_bytes(self) -> int:
        """The byte bound for reading a text.

        A token stands for at most ``longest_token_bytes`` of the text that the tokenizer keeps. Text that it
        drops or merges (blanks, unknown words) has no token. So a text that is short enough to be read
        cheaply is read and counted for every context size.
        """
        return max(MIN_PROMPT_BYTES, self.max_context_tokens * self.longest_token_bytes)


# Provides the folder of a version's verified files.
OpenFolder = Callable[[], AbstractAsyncContextManager[Path]]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The tokens of a text. ``ids`` is empty where ``count`` is more than the model's context."""

    count: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowTexts:
    """Texts of the rows of a fixed-cost model. ``seconds`` are the other texts of pairs; empty: no pairs."""

    texts: Sequence[str]
    seconds: Sequence[str] = ()
    # Each row is cut to so many tokens, special tokens among them; 0: none is cut.
    most_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The tokens of rows, one row after the other: 64-bit little-endian.

    ``ids`` and ``types`` are empty where a length is more than the model takes; ``types`` also without pairs.
    """

    lengths: Sequence[int]
    ids: bytes
    types: bytes


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A PNG or a JPEG as a client sends it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Pixels:
    """What an image model reads: 32-bit floats, row-major. ``shape``: channels, height, width."""

    shape: Sequence[int]
    data: bytes


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Token ids of a version, whose text is wanted."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class DecodedText:
    """The text of token ids, with the spellings of control tokens."""

    text: str


class Texts(Protocol):
    async def load(self, version_digest: str, folder: OpenFolder) -> TextModel:
        """Return the text facts of a version; its texts can be read from then on.

        Raises FailedPrecondition for unusable files, Unavailable, and the errors of ``folder``.
        """

    def unload(self, version_digest: str) -> None:
        """Release a version's resources."""

    async def read(
        self, model: TextModel, tenant_id: str, text: str | Conversation, *, size_bytes: int
    ) -> EncodedText:
        """Return the tokens of a prompt or of a conversation with ``size_bytes`` of text.

        Raises InvalidInput (PromptTooLong, UnsupportedFeature) for text that the version does not accept,
        FailedPrecondition where its files fail on it, Unavailable where a retry may help.
        """

    async def check(self, model: TextModel, tenant_id: str, constraint: Constraint) -> Constraint:
        """Return the constraint for workers, if outputs can be held to it at a bounded cost.

        Raises ConstraintRefused, UnsupportedFeature for a tokenizer that cannot be constrained, and
        Unavailable where a retry may help.
        """

    async def read_rows(
        self, model: TextModel, tenant_id: str, rows: RowTexts, *, size_bytes: int
    ) -> EncodedRows:
        """Return the tokens of rows with ``size_bytes`` of text. Raises as ``read`` does."""

    async def read_picture(self, model: TextModel, tenant_id: str, picture: PictureFile) -> Pixels:
        """Return the pixels of a picture, made as the version's files declare. Raises as ``read`` does."""

    async def decode(self, model: TextModel, tenant_id: str, run: TokenRun) -> str:
        """Return the text of token ids, all within the vocabulary. Raises as ``read`` does."""
