"""What is stored, and that packing, chunking and strides do not change it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from coat_core.config import FP8QuantizationConfig
from coat_core.ops import adamw
from coat_core.ops.adamw import chunks
from coat_core.optim import FP8AdamW
from coat_core.optim.state import read_state, storages
from tests.helpers.operators import bits
from tests.optim.common import CONFIGS, UNQUANTIZED, assert_same, make_params, params_of, run, set_grads

STOCHASTIC = FP8QuantizationConfig(stochastic_rounding=True)


def test_state_bytes_counts_codes_and_per_block_numbers():
    param = Parameter(torch.randn(1024, 16))
    param.grad = torch.randn_like(param)
    sizes = {}
    for name in ("default", "plain", "unquantized", "only_m1", "integers", "ratio_fp32"):
        optimizer = FP8AdamW([param], fp8_config=CONFIGS[name])
        assert optimizer.state_bytes() == 0
        optimizer.step()
        sizes[name] = optimizer.state_bytes()
    n, blocks = 16384, 128
    assert sizes == {
        "default": 2 * n + 6 * 4 * blocks,
        "plain": 2 * n + 2 * 4 * blocks,
        "unquantized": 8 * n,
        "only_m1": 5 * n + 3 * 4 * blocks,
        "integers": 2 * n + 3 * 4 * blocks,  # half of what expanded FP8 adds to the codes
        "ratio_fp32": 5 * n + 4 * blocks,
    }


@pytest.mark.parametrize("limit", [1, 256])
def test_chunk_size_changes_no_bit(monkeypatch, limit):
    config = replace(CONFIGS["integers"], moment_rounding="stochastic")

    def trained() -> FP8AdamW:
        params = make_params([(40, 33), (128,), (5,), (700,), (3, 128)])
        optimizer = FP8AdamW(params, fp8_config=config)
        run(optimizer, params, range(4))
        return optimizer

    expected = trained()
    monkeypatch.setattr(adamw, "chunk_elements", lambda _: limit)
    assert_same(expected, trained())


def test_chunks_end_at_the_limit_and_where_the_packed_state_does_not_go_on():
    def found(sizes: tuple[int, ...], first_blocks: tuple[int, ...]) -> list[tuple[list[tuple[int, int, int]], slice]]:
        return [(chunk.pieces, chunk.rows) for chunk in chunks(sizes, first_blocks, 4, 8)]

    assert found((5, 2, 20), (0, 2, 3)) == [
        ([(0, 0, 5)], slice(0, 2)),  # padding counts
        ([(1, 0, 2)], slice(2, 3)),
        ([(2, 0, 8)], slice(3, 5)),
        ([(2, 8, 16)], slice(5, 7)),
        ([(2, 16, 20)], slice(7, 8)),
    ]
    assert found((3, 0, 3), (0, 4, 4)) == [([(0, 0, 3)], slice(0, 1)), ([(1, 0, 0), (2, 0, 3)], slice(4, 5))]
    assert found((), ()) == []


def test_stochastic_rounding_moves_bf16_parameters_that_nearest_leaves():
    def mean_after(stochastic: bool) -> float:
        param = Parameter(torch.ones(4_000, dtype=torch.bfloat16))
        config = replace(STOCHASTIC, stochastic_rounding=stochastic)
        optimizer = FP8AdamW([param], lr=1e-4, weight_decay=0.0, fp8_config=config)  # 1/39 of an ulp below 1
        for _ in range(50):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return param.detach().double().mean().item()

    assert mean_after(stochastic=False) == 1.0
    assert mean_after(stochastic=True) == pytest.approx(1 - 50 * 1e-4, abs=5e-4)


def test_stochastic_rounding_leaves_fp32_parameters_and_the_generator_alone():
    exact, stochastic = FP8AdamW(make_params()), FP8AdamW(make_params(), fp8_config=STOCHASTIC)
    run(exact, params_of(exact), range(3))
    before = torch.get_rng_state()
    run(stochastic, params_of(stochastic), range(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(exact, stochastic)


# -- draws: exp_avg_sq does not drift, and they depend on nothing else -------------------------------------------------
STORED: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "plain": {"use_dynamic_range_expansion": False},
    "integers": {"m1_format": "int8_ratio", "m2_format": "uint8_log"},
}


def drawn(name: str, rounding: str = "stochastic") -> FP8QuantizationConfig:
    return FP8QuantizationConfig(**STORED[name], moment_rounding=rounding)


@pytest.mark.parametrize("name", ["e4m3", "integers"])
def test_mean_of_exp_avg_sq_stays_where_nearest_drifts(name):
    """60 steps of gradients that are each as large as ever: v is far from its end, and falls and rises."""
    spread = torch.logspace(-3, 0, 16 * 128)[torch.randperm(16 * 128, generator=torch.Generator().manual_seed(0))]
    params = [Parameter(torch.zeros(16, 128)) for _ in range(3)]
    kinds = [drawn(name), drawn(name, "nearest"), UNQUANTIZED]
    optimizers = [FP8AdamW([param], fp8_config=kind) for param, kind in zip(params, kinds, strict=True)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        grad = torch.randn(16, 128, generator=generator) * spread.view(16, 128)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad
            optimizer.step()
    stochastic, nearest, exact = (
        read_state(optimizer.state[param], storages(kind))[1].double()
        for param, optimizer, kind in zip(params, optimizers, kinds, strict=True)
    )
    assert (stochastic / exact).mean().item() == pytest.approx(1.0, abs=0.01)
    assert (nearest / exact).mean().item() > 1.02


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_each_step_has_draws_of_its_own(rounding):
    """With beta2 0 and the same gradient v is the same at every step, and only its draws differ."""
    param = Parameter(torch.zeros(8, 128))
    optimizer = FP8AdamW([param], betas=(0.9, 0.0), fp8_config=drawn("e4m3", rounding))
    grad = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    codes = []
    for _ in range(2):
        param.grad = grad.clone()
        optimizer.step()
        codes.append(bits(optimizer.state[param]["exp_avg_sq_codes"]).clone())
    assert torch.equal(*codes) == (rounding == "nearest")


@pytest.mark.parametrize("name", ["e4m3", "integers"])
def test_a_parameter_draws_the_same_whoever_else_has_a_gradient(name):
    """Nor do where its blocks are packed, the others' dtypes and the order of arrival change a bit."""
    together, apart = ([*make_params(), *make_params(dtype=torch.bfloat16)] for _ in range(2))
    config = replace(drawn(name), stochastic_rounding=True)
    optimizer, other = (FP8AdamW(params, fp8_config=config) for params in (together, apart))
    run(optimizer, together, range(3))
    for index in reversed(range(len(apart))):
        for step in range(3):
            set_grads(apart, step)
            for number, param in enumerate(apart):
                if number != index:
                    param.grad = None
            other.step()
    assert_same(optimizer, other)
