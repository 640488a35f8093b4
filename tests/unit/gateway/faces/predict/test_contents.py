from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.predict.codecs import DTYPES, bytes_of, elements_of, flat


@pytest.mark.parametrize("datatype", sorted(DTYPES))
def test_elements_survive_a_round_trip(datatype: str) -> None:
    elements: list[Any] = [True, False] if datatype == "BOOL" else [0, 1, 100]
    data = bytes_of(elements, datatype, "x")
    assert len(data) == len(elements) * np.dtype(DTYPES[datatype]).itemsize
    assert elements_of(data, datatype) == elements


@pytest.mark.parametrize(
    ("elements", "datatype"),
    [
        ([1.5], "INT64"),
        ([True], "INT64"),
        ([1], "BOOL"),
        (["1"], "FP32"),
        ([None], "FP32"),
        ([True], "FP32"),
        ([256], "UINT8"),
        ([-1], "UINT64"),
        ([2**63], "INT64"),
    ],
)
def test_an_element_of_another_type_or_range_is_refused(elements: list[Any], datatype: str) -> None:
    with pytest.raises(InvalidInput):
        bytes_of(elements, datatype, "x")


def test_a_large_number_becomes_infinity_as_in_numpy() -> None:
    assert elements_of(bytes_of([1e300], "FP32", "x"), "FP32") == [float("inf")]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BYTES"])
def test_types_without_elements_are_refused(datatype: str) -> None:
    with pytest.raises(UnsupportedFeature):
        bytes_of([1], datatype, "x")
    with pytest.raises(UnsupportedFeature):
        elements_of(b"12", datatype)


def test_nested_lists_are_flattened_in_row_major_order() -> None:
    assert flat([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "x") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert flat([1, 2], "x") == [1, 2]
    assert flat([], "x") == []


def test_what_is_no_nested_list_is_refused() -> None:
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    for value in ([[1], 2], [[1], [[2]]], deep):
        if value == [[1], [[2]]]:
            assert flat(value, "x") == [1, [2]]  # refused by the type of its element
            continue
        with pytest.raises(InvalidInput):
            flat(value, "x")
