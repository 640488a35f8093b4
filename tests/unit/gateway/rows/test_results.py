from __future__ import annotations

import numpy as np
import pytest

from services.core.errors import InternalError
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.signature import Operation, Signature
from services.gateway.rows.results import score_output, scores

SIGMOID = Signature(Operation.SCORE, (), ())
LOGIT = Signature(Operation.SCORE, (), (), score="logit")


def end(*logits: float, datatype: str = "FP32") -> RowEnd:
    return RowEnd((RawTensor("logits", datatype, (len(logits),), np.array(logits, np.float32).tobytes()),))


def test_scores_are_sigmoids_and_never_overflow() -> None:
    found = scores(score_output([end(0.0), end(2.0), end(-2.0), end(1e30), end(-1e30)], SIGMOID))
    assert found[0] == 0.5
    assert found[1] == pytest.approx(1 / (1 + np.exp(-2.0)))
    assert found[1] + found[2] == pytest.approx(1.0)
    assert found[3:] == [1.0, 0.0]


def test_scores_are_logits_where_the_version_declares_it() -> None:
    assert scores(score_output([end(0.0), end(2.5), end(-11.25)], LOGIT)) == [0.0, 2.5, -11.25]


def test_small_scores_keep_their_order() -> None:
    near, far = scores(score_output([end(-40.0), end(-41.0)], SIGMOID))
    assert near > far > 0.0


@pytest.mark.parametrize("bad", [RowEnd(), end(1.0, datatype="FP64"), end(1.0, 2.0)])
def test_another_output_is_a_bug(bad: RowEnd) -> None:
    with pytest.raises(InternalError):
        score_output([end(1.0), bad], SIGMOID)
