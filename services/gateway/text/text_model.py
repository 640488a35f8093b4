"""The text facts of a model version that requests need: limits and sampling defaults.

The tokenizer and template run in separate processes: see ``text/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fairway.formats.names import GATEWAY_FILES

# At most about 4 s of a text process, which delays no other client: see ``text/limits.py``.
MIN_PROMPT_BYTES: Final = 1024 * 1024


def is_text_file(path: str) -> bool:
    """Return whether the gateway reads this file of a version."""
    return path in GATEWAY_FILES


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, as the client sent it."""

    role: str
    content: str
    name: str = ""


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
    # Why the chat template renders no conversation, so that the version takes prompts only.
    template_fault: str = ""

    @property
    def max_prompt_bytes(self) -> int:
        """The byte bound for reading a text.

        A token stands for at most ``longest_token_bytes`` of the text that the tokenizer keeps. Text that it
        drops or merges (blanks, unknown words) has no token. So a text that is short enough to be read
        cheaply is read and counted for every context size.
        """
        return max(MIN_PROMPT_BYTES, self.max_context_tokens * self.longest_token_bytes)
