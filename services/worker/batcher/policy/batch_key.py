"""Which requests may share a forward pass. Pure.

The key has everything that defines the computation: a batch of rows of two keys is a wrong answer. The
length of a row is not part of it, for padding is masked: which lengths share a batch (``length_buckets``) is
efficiency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import ANY, Operation, TensorSpec

Parameter = str | int | float | bool

_MOST_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class BatchKey:
    """Equal keys: one computation. Values are compared with their types: 1, 1.0 and True differ."""

    version_digest: str
    operation: Operation
    dtype: str  # number format of the computation
    inputs: tuple[TensorSpec, ...]  # the inputs as sent, sorted by name; a length is ``ANY``
    # Name, type and value of each parameter that changes results.
    parameters: tuple[tuple[str, str, Parameter], ...]

    @staticmethod
    def of(
        version_digest: str,
        operation: Operation,
        dtype: str,
        inputs: Iterable[TensorSpec],
        parameters: Mapping[str, Parameter],
    ) -> BatchKey:
        """Return the key of a request with these tensors, in their actual shapes."""
        sent = tuple(sorted((_without_length(spec) for spec in inputs), key=lambda spec: spec.name))
        named = tuple((name, type(value).__name__, value) for name, value in sorted(parameters.items()))
        return BatchKey(version_digest, operation, dtype, sent, named)


def _without_length(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(ANY, *spec.shape[1:])) if spec.has_length else spec


class BatchKeys:
    """The keys of one version's rows; the recent ones are kept, for most rows have the same tensors."""

    def __init__(self, version_digest: str, operation: Operation, dtype: str, *, has_length: bool) -> None:
        self._computation = version_digest, operation, dtype
        self._has_length = has_length
        self._kept: dict[tuple[tuple[str, str, tuple[int, ...]], ...], BatchKey] = {}

    def of(self, inputs: Sequence[RawTensor]) -> BatchKey:
        """Return the key of a row."""
        has_length = self._has_length
        sent = tuple(
            [
                (tensor.name, tensor.datatype, (1, *tensor.shape[1:]) if has_length else tensor.shape)
                for tensor in inputs
            ]
        )
        key = self._kept.get(sent)
        if key is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            specs = tuple(TensorSpec(*each, has_length) for each in sent)
            key = self._kept[sent] = BatchKey.of(*self._computation, specs, {})
        return key
