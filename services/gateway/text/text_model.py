"""The text side of a model version as the gateway's requests see it: limits and sampling defaults.

What its tokenizer and template do happens in processes of their own: see ``text/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fairway.formats.names import GATEWAY_FILES

# Some 4 s of a text process at most, which costs nobody else: see ``text/limits.py``.
MIN_PROMPT_BYTES: Final = 1024 * 1024


def is_text_file(path: str) -> bool:
    """Return whether a file of a version is one that the gateway reads."""
    return path in GATEWAY_FILES


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, as the client sent it."""

    role: str
    content: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a version's generation_config.json sets; else the neutral values of ``Sampling``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TextModel:
    """What one version's files say about its text. ``depends_on_time``: the chat template reads the clock.

    ``template_fault``: why the chat template renders no conversation, so that the version takes prompts only.
    """

    version_digest: str
    vocab_size: int
    max_context_tokens: int
    longest_token_bytes: int
    defaults: SamplingDefaults
    depends_on_time: bool
    template_fault: str = ""

    @property
    def max_prompt_bytes(self) -> int:
        """More text than this is not read.

        A token stands for at most ``longest_token_bytes`` of what the tokenizer keeps, but what it drops or
        merges (blanks, unknown words) is no token at all. So a text that is short enough to be read at
        little cost is read and counted, whatever the context.
        """
        return max(MIN_PROMPT_BYTES, self.max_context_tokens * self.longest_token_bytes)
