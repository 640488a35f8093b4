"""The safety packs that a request obeys, which every later run of it obeys too, and what they find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from fairway.formats.safety import SafetyAction, Scope

# What stands for text that a pack redacts, and for each of its token ids: no vocabulary has that one.
REDACTED_TEXT: Final = "[redacted]"
REDACTED_ID: Final = 0xFFFF_FFFF
# The category of texts that a model of the pack gave no verdict on.
UNAVAILABLE: Final = "unavailable"


class SafetyPins(Struct, frozen=True):
    """New fields are added at the end, with a default: gateways of two releases read each other's records."""

    # Digest of the safety_policy.json of the request's version; empty: it has none.
    default_digest: str = ""
    # Deployment of the tenant's pack; empty: the tenant has none.
    deployment: str = ""
    # Name in the registry of the tenant's pack.
    model: str = ""
    # Version of the tenant's pack.
    pack_digest: str = ""
    # Step of the rollout that drew the version; empty: no draw.
    step: str = ""
    # Version that the request is compared with, whose verdicts only flag; empty: none.
    shadow_digest: str = ""

    @property
    def text(self) -> str:
        """What an explanation shows."""
        found = [f"{self.default_digest} of the version"] if self.default_digest else []
        if self.pack_digest:
            found.append(f"{self.pack_digest} of {self.deployment}")
        if self.shadow_digest:
            found.append(f"{self.shadow_digest} flags only")
        return ", ".join(found)


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
