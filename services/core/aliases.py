"""Aliases: a model name for several deployments, of which the smallest that meets a request serves it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.core.records import ROOT, Meta

ALIASES: Final = ROOT + "aliases/"
MAX_REASON_CHARS: Final = 120


class Capability(StrEnum):
    """What a generation may ask of a model beyond text."""

    TOOLS = "tools"
    SCHEMAS = "schemas"


@dataclass(frozen=True, slots=True)
class SizeNeeds:
    """What a generation states about the model that is to answer, apart from its tokens."""

    quality: int = 0
    capabilities: tuple[Capability, ...] = ()


@dataclass(frozen=True, slots=True)
class AliasSize:
    """One deployment of an alias, and what it declares. See AliasSize in controlplane.proto."""

    deployment: str
    quality: int = 0
    context_tokens: int = 0  # most tokens of a prompt and its output; 0: the model's own bound
    capabilities: tuple[Capability, ...] = ()

    def unmet(self, needs: SizeNeeds) -> str:
        """Return why it does not meet the needs, empty if it meets them."""
        if needs.quality > self.quality:
            return f"needs quality {needs.quality}, has {self.quality}"
        missing = [one for one in needs.capabilities if one not in self.capabilities]
        return f"needs {' and '.join(missing)}" if missing else ""


@dataclass(frozen=True, slots=True)
class Alias:
    """The sizes behind a model name, the smallest first. Key: ``ALIASES`` and the name."""

    meta: Meta
    sizes: tuple[AliasSize, ...] = ()


@dataclass(frozen=True, slots=True)
class PassedSize:
    """A smaller size that does not serve a request, and why."""

    deployment: str
    reason: str


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """The alias that a request named, and its sizes before the one that serves."""

    alias: str
    passed: tuple[PassedSize, ...] = ()

    def after(self, deployment: str, reason: str) -> SizeChoice:
        """Return the choice once this size was passed over too."""
        return SizeChoice(self.alias, (*self.passed, PassedSize(deployment, reason[:MAX_REASON_CHARS])))

    @property
    def unmet(self) -> str:
        """Return why the smaller sizes do not serve it; empty for the smallest."""
        return "; ".join(f"{one.deployment} {one.reason}" for one in self.passed)

    @property
    def text(self) -> str:
        """Return it in one line."""
        return f"smallest of {self.alias}" + (f"; {self.unmet}" if self.passed else "")
