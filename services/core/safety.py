"""The safety rules of one request, and what they found in its texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fairway.formats.safety import SafetyAction, SafetyPack, Scope

# What stands for text that a pack redacts, and for each of its token ids: no vocabulary has that one.
REDACTED_TEXT: Final = "[redacted]"
REDACTED_ID: Final = 0xFFFF_FFFF
# The category of texts that a model of the pack gave no verdict on. No pack can define it.
UNAVAILABLE: Final = "unavailable!"


@dataclass(frozen=True, slots=True)
class SafetyTerms:
    """The rules of one request, pinned at its admission."""

    # The version whose own pack applies; empty: it has none.
    default_digest: str
    # The tenant's pack; empty: it has none.
    pack_digest: str
    # The stricter of both.
    pack: SafetyPack
    # Whether everything passes, and what would act is flagged.
    flag_only: bool = False

    @property
    def digests(self) -> str:
        """Both digests: what decides, with the rules' order, what of a text passes."""
        return f"{self.default_digest}+{self.pack_digest}" + ("?" if self.flag_only else "")

    def action_of(self, category: str) -> SafetyAction:
        """Return what a find of the category does."""
        if self.flag_only:
            return "flag"
        return "block" if category == UNAVAILABLE else self.pack.categories[category].action


@dataclass(frozen=True, slots=True)
class Intervention:
    """One find of a pack in a request, without the text."""

    action: SafetyAction
    category: str
    scope: Scope
    # The output; 0 of an input.
    choice: int
    # Characters of the text before the find.
    position: int
    # SHA-256 of the text that was found, in hex.
    text_digest: str
