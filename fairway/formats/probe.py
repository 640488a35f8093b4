"""The probe of a version: ``safety_probe.safetensors``, a linear judge of the decoder's last hidden states.

Tensors: ``weight`` [categories, hidden size] and ``bias`` [categories]; ``categories`` of the metadata is a
JSON list of their names. A token's score is the greatest sigmoid(weight . state + bias), where the state is
what the output head makes the token's logits of. So it judges prompt and output before the token, not the
token itself: that one is judged by the score of the token after it.

The file counts as weights of its version: ``weights_digest`` pins it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import msgspec

from fairway.formats import safetensors
from fairway.formats.limits import POLICY_NAME
from fairway.formats.safety import CATEGORY_PATTERN, check_policy
from fairway.formats.weights import BadWeights, Read, TensorLayout, compare

PROBE: Final = "safety_probe.safetensors"
MAX_PROBE_CATEGORIES: Final = 16
_LABELS: Final = "categories"


def require_probe(names: Collection[str], read: Read, hidden_size: int) -> tuple[str, ...]:
    """Return the categories of a version's probe, none without one, for a decoder of this hidden size.

    ``read`` returns a small file, and of a tensor file its header. Raises BadWeights with what is wrong, also
    where the version's own safety policy has a rule for a probe and there is none.
    """
    if PROBE not in names:
        if wants_probe(names, read):
            raise BadWeights(f"{POLICY_NAME}: probe: the version has no {PROBE}; add it, or remove the rule")
        return ()
    try:
        header = read(PROBE)
        tensors = safetensors.tensors_of(header)
        categories = _categories(safetensors.metadata_of(header))
        count = len(categories)
        compare(tensors, TensorLayout({"weight": (count, hidden_size), "bias": (count,)}))
    except (safetensors.BadHeader, BadWeights) as error:
        raise BadWeights(f"{PROBE}: {error}") from error
    return categories


def wants_probe(names: Collection[str], read: Read) -> bool:
    """Return whether the safety policy among the files has a rule for a probe. Raises BadWeights."""
    if POLICY_NAME not in names:
        return False
    try:
        return check_policy(read(POLICY_NAME)).probe is not None
    except ValueError as error:
        raise BadWeights(f"{POLICY_NAME}: {error}") from error


def _categories(metadata: dict[str, str]) -> tuple[str, ...]:
    try:
        found = msgspec.json.decode(metadata.get(_LABELS, ""), type=tuple[str, ...])
    except msgspec.DecodeError as error:
        raise BadWeights(f"its metadata has no {_LABELS}, a JSON list of names") from error
    if not 0 < len(found) <= MAX_PROBE_CATEGORIES or len(set(found)) < len(found):
        raise BadWeights(
            f"{_LABELS} of its metadata are 1 to {MAX_PROBE_CATEGORIES} different names, not {len(found)}"
        )
    for name in found:
        if not re.fullmatch(CATEGORY_PATTERN, name):
            raise BadWeights(f"{_LABELS} of its metadata: {name[:80]!r} is no name of a category")
    return found
