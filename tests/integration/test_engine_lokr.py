"""LoKr in the stand-alone trainer: ai-toolkit's matrices and names, the fused flow, resume to the bit."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coat_flux.blocks.lora import LokrLinear, lokr_shapes, split_width
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import optimizer_bytes
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import FEW_LINEARS, engine_job


@pytest.mark.parametrize(
    ("width", "factor", "expected"),
    [(3072, 8, (8, 384)), (3072, -1, (48, 64)), (127, 8, (1, 127)), (360, 16, (15, 24)), (64, 16, (16, 4))],
)
def test_widths_are_split_as_in_ai_toolkit(width, factor, expected):
    assert split_width(width, factor) == expected


@pytest.mark.parametrize("rank", [None, 2])
def test_the_module_multiplies_by_the_kronecker_matrix(rank):
    base = torch.nn.Linear(24, 36)
    lokr = LokrLinear(base, 4, rank, torch.device("cpu"), torch.Generator().manual_seed(0))
    x = torch.randn(3, 5, 24)
    assert torch.equal(lokr(x), base(x))  # W2 begins with zero
    for parameter in lokr.parameters():
        torch.nn.init.normal_(parameter)
    torch.testing.assert_close(lokr(x), base(x) + x @ torch.kron(*lokr.adapter.matrices(torch.float32)).t())


@pytest.mark.parametrize(("full_rank", "coat"), [(True, {"memory": {"checkpointing": "none"}}), (False, None)])
def test_a_run_and_its_resume_end_with_the_same_file(full_rank, coat, place):
    network = {**FEW_LINEARS, "type": "lokr", "linear": 2, "lokr_factor": 8, "lokr_full_rank": full_rank}
    job = engine_job(f"lokr_{full_rank}", **place, coat=coat, train={"steps": 4}, network=network)
    job["config"]["process"][0]["save"]["save_every"] = 2
    seen: list[Any] = []
    final = COATTrainer(job, observer=seen.append).train()
    expected = load_file(final)
    assert_all_bitwise(load_file(COATTrainer(job).train(from_step=2)), expected)
    facts, session = JobFacts(seen[-1].job), seen[-1]
    assert facts.adapter_sizes == [parameter.numel() for parameter in session.lora.values()]
    assert optimizer_bytes(facts) == sum(
        value.nbytes
        for state in session.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    assert ("fused flow, attention" in (final.parent / "coat" / "log.txt").read_text(encoding="utf-8")) == bool(coat)
    linears = {name.rpartition(".")[0] for name in expected}
    for name in linears:
        linear = session.transformer.get_submodule(name.removeprefix("transformer."))
        shapes = lokr_shapes(linear.out_features, linear.in_features, 8, None if full_rank else 2)
        assert {key: tuple(expected[f"{name}.{key}"].shape) for key in shapes} == shapes
        assert expected[f"{name}.alpha"] == 2
    assert sum(name.rpartition(".")[0] in linears for name in expected) == len(expected)
    last = "lokr_w2" if full_rank else "lokr_w2_b"
    assert any(expected[f"{name}.{last}"].any() for name in linears)
