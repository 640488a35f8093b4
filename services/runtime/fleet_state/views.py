"""What a reader of an informer needs of it: the records under a prefix, as last seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from services.runtime.fleet_state.informer import Versioned

Record = TypeVar("Record")


class RecordView(Protocol[Record]):
    """Implemented by ``Informer``; a test holds a dictionary instead."""

    @property
    def view(self) -> Mapping[str, Versioned[Record]]:
        """The records by full store key. Immutable: a later change makes a new mapping."""
