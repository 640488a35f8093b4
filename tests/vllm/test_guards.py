"""A guard model on vLLM behind a gateway: ShieldGemma's family, which our own engine does not run."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from fairway.v1 import common_pb2
from services.rpc.status import from_rpc_error
from tests.integration.safety.test_judges import SHIELD_RULE, TEXTS, complete, obey, reason_of, scores
from tests.support.judged_gateway import TINY, judged_gateway, write_guard


async def test_shieldgemma_judges_what_our_engine_generates(vllm_dir: Path, tmp_path: Path) -> None:
    guard = write_guard(tmp_path / "shield", "Gemma2", seed=5, head_dim=32)
    models = {"chat": TINY, "shield": guard}
    async with judged_gateway(tmp_path, models, on_vllm=["shield"], vllm_dir=vllm_dir) as judged:
        rule = SHIELD_RULE | {"scopes": ["input"]}
        obey(judged, rule)
        found = await scores(judged, *TEXTS)
        assert all(0.0 < score < 1.0 for score in found)
        worst, best = max(found), min(found)
        assert best < worst
        obey(judged, rule | {"threshold": (worst + best) / 2})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await complete(judged, TEXTS[found.index(worst)])
        assert from_rpc_error(refused.value).reason == "CONTENT_FILTERED"
        passed = await complete(judged, TEXTS[found.index(best)])
        assert reason_of(passed) == common_pb2.FINISH_REASON_LENGTH
        obey(judged, SHIELD_RULE | {"scopes": ["output"], "threshold": 0.0})
        assert reason_of(await complete(judged, TEXTS[0])) == common_pb2.FINISH_REASON_FILTERED
