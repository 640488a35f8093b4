"""What of the GPU benchmark runs anywhere: its arithmetic, its random models and its driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bench import gpu
from bench.engines.load import Request
from bench.gpus.own import OwnEngine, decode_ratio, own_engine, prefill_ratio, tokens_per_s
from bench.gpus.random_model import SHAPES, RandomTensors, transformers_model
from bench.gpus.roofline import Rates, Work, measured_rates
from fairway.formats.decoder_config import parse_config
from services.worker.engine_protocol import EngineConfig
from tests.tidy.sources import ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CPU = torch.device("cpu")
RATES = Rates(copy_bytes_per_s=4.3e12, matmul_flops_per_s=790e12)
CONFIG = EngineConfig(
    socket_path="",
    model_dir="",
    operators="torch",
    block_size=4,
    kv_blocks=200,
    token_budget=64,
    max_sequences=8,
)


@pytest.fixture(scope="module")
def own() -> OwnEngine:
    torch.set_num_threads(1)
    return own_engine(SHAPES["tiny"], CONFIG, max_model_len=48)


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"), [("1b", 1_235_746_816, 32_768), ("8b", 7_504_658_432, 131_072)]
)
def test_shapes_have_the_sizes_that_they_are_named_after(name: str, parameters: int, kv_bytes: int) -> None:
    work = Work(parse_config(SHAPES[name]), 2)
    assert work.weight_bytes == 2 * parameters
    assert work.kv_token_bytes == kv_bytes


def test_decode_is_bound_by_memory_until_the_batch_is_large() -> None:
    work = Work(parse_config(SHAPES["8b"]), 2)
    alone = work.decode_s(RATES, sequences=1, attended_tokens=1024)
    assert alone == pytest.approx((work.weight_bytes + 1024 * 131_072) / 4.3e12)
    many = work.decode_s(RATES, sequences=4096, attended_tokens=0)
    assert many == pytest.approx(4096 * work.weight_bytes / 790e12)


def test_prefill_counts_products_and_causal_attention() -> None:
    work = Work(parse_config(SHAPES["8b"]), 2)
    one = work.prefill_s(RATES, prompts=1, prompt_tokens=1)
    assert one == pytest.approx((work.weight_bytes + 4 * 32 * 4096) / 790e12)
    short = work.prefill_s(RATES, prompts=2, prompt_tokens=1024)
    long = work.prefill_s(RATES, prompts=1, prompt_tokens=2048)
    head = 2 * work.head_parameters / 790e12
    attention = 4 * 32 * 4096 * (2048 * 2049 / 2 - 1024 * 1025) / 790e12
    assert long - short == pytest.approx(attention - head)


def test_rates_are_measured() -> None:
    rates = measured_rates(CPU, torch.float32, copy_bytes=1 << 22, matmul_side=64)
    assert rates.copy_bytes_per_s > 1e8
    assert rates.matmul_flops_per_s > 1e7


def test_a_random_tensor_depends_on_its_name_alone() -> None:
    tensors = RandomTensors(parse_config(SHAPES["tiny"]), CPU)
    head = tensors.tensor("lm_head.weight", dtype=torch.float32)
    assert torch.equal(head, tensors.tensor("lm_head.weight", dtype=torch.float32))
    assert head.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(head, tensors.tensor("model.embed_tokens.weight", dtype=torch.float32))
    assert bool((tensors.tensor("model.norm.weight", dtype=torch.float32) == 1).all())


def test_both_sides_have_the_same_weights(own: OwnEngine) -> None:
    requests = [Request([5, 6, 7, 8, 9, 10], 6), Request([11, 12, 13], 6)]
    own.run(requests)
    peer = transformers_model(SHAPES["tiny"], CPU, torch.float32)
    for handle, request in enumerate(requests):
        made = peer.generate(
            torch.tensor([request.prompt]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.int64),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert made[0, len(request.prompt) :].tolist() == own.last_tokens[handle]


def test_steps_tell_what_they_computed(own: OwnEngine) -> None:
    steps = own.run([Request([5] * 20, 5)] * 3)
    assert sum(step.prefill_tokens for step in steps) == 60
    full = [step for step in steps if step.decoded == 3]
    assert [step.attended_tokens for step in full] == [3 * 21, 3 * 22, 3 * 23, 3 * 24]
    assert all(step.wall_s > 0 for step in steps)


def test_the_driver_measures(own: OwnEngine) -> None:
    work = Work(own.model, 4)
    slow = Rates(1e9, 1e9)
    assert decode_ratio(own, work, slow, prompt=[5] * 20, batch=4, output_tokens=8) > 0
    assert prefill_ratio(own, work, slow, prompt=[5] * 30, prompts=2, rounds=2) > 0
    assert tokens_per_s(own, [Request([5] * 10, 4)] * 2) > 0


def test_exact_is_measured_against_free() -> None:
    assert (gpu.config_of(CPU).mode, gpu.config_of(CPU, "exact").mode) == ("free", "exact")
    assert gpu.over(0.2, 0.8) == pytest.approx(0.25)
    assert gpu.over(0.2, None) is None


def test_the_workload_fits_the_engine_that_is_measured() -> None:
    config = gpu.config_of(CPU)
    requests = gpu.workload()
    assert len(requests) == gpu.REQUESTS
    tokens = [len(each.prompt) + each.output_tokens for each in requests]
    assert max(tokens) <= gpu.MAX_MODEL_LEN
    assert sum(-(-count // config.block_size) for count in tokens) <= config.kv_blocks


def test_transformers_batches_the_same_requests() -> None:
    peer = transformers_model(SHAPES["tiny"], CPU, torch.float32)
    rate = gpu.transformers_tokens_per_s(peer, [Request([5, 6, 7], 3)] * 2, blocks=8, step_tokens=64)
    assert rate > 0


def test_without_a_device_it_says_so_and_measures_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == gpu.NO_DEVICE
    assert "RESULT" not in done.stdout
    assert "nothing was measured" in done.stderr
