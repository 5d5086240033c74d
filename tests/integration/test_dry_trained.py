"""Linears with trained weights on a GPU that is not there: which kernels are launched."""

from __future__ import annotations

import pytest
import torch

from coat_core.config import FP8LinearConfig
from coat_core.linear import FP8TrainableLinear

pytest.importorskip("triton", reason="the kernels' signatures are Triton's")
from tests.helpers.dry_gpu import dry_gpu

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/integration/test_gpu_step.py"),
]


def test_a_trained_linear_casts_its_weight_once_and_in_every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FP8LinearConfig(cache_weight=True, wgrad_format="e4m3")
    per_tensor = {"_share_amax_fwd_kernel": 1, "_cast_by_amax_fwd_kernel": 1}
    per_batch = {"_quantize_rows_fwd_kernel": 3, "_transpose_codes_fwd_kernel": 2}  # x, dy, dy by feature; W, x
    with dry_gpu(monkeypatch) as gpu:
        layer = torch.nn.Linear(3072, 1024, device="cuda", dtype=torch.bfloat16)
        FP8TrainableLinear.from_linear(layer, config)

        def batches(count: int) -> None:
            for _ in range(count):
                x = torch.zeros(3, 7, 3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # padded to 32
                layer(x).sum().backward()

        batches(2)
        assert gpu.launches == {name: 2 * n for name, n in per_batch.items()} | per_tensor
        gpu.launches.clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        batches(1)
        assert gpu.launches == per_batch | {name: 2 * n for name, n in per_tensor.items()}  # forward and dgrad
