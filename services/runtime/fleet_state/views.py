"""The reader's interface of an informer: the records under a prefix, as last observed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from services.runtime.fleet_state.informer import Versioned

Record = TypeVar("Record")


class RecordView(Protocol[Record]):
    """Implemented by ``Informer``; tests use a dictionary."""

    @property
    def view(self) -> Mapping[str, Versioned[Record]]:
        """The records by full store key. Immutable: a later change makes a new mapping."""
