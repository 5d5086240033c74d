"""FLUX.1-dev's geometry with random weights: the right size, and made on the device only."""

from __future__ import annotations

import pytest
import torch

from coat_flux.blocks.models.flux1 import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry


def test_flux_dev_geometry_has_flux_devs_parameters():
    model = make_flux_dev_geometry("meta", torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_901_408_320
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.config.axes_dims_rope == FLUX_DEV_TRANSFORMER_CONFIG["axes_dims_rope"]


def test_flux_dev_geometry_is_filled_on_the_device():
    small = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 32}
    model = make_flux_dev_geometry("cpu", torch.bfloat16, **small)
    assert {(p.device.type, p.dtype, p.requires_grad) for p in model.parameters()} == {("cpu", torch.bfloat16, False)}
    weight = model.transformer_blocks[0].ff.net[0].proj.weight
    assert weight.float().std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert torch.equal(model.transformer_blocks[0].attn.norm_q.weight, torch.ones(128, dtype=torch.bfloat16))
    assert torch.equal(weight, make_flux_dev_geometry("cpu", **small).transformer_blocks[0].ff.net[0].proj.weight)
    with torch.no_grad():
        output = model(
            hidden_states=torch.randn(1, 16, 64, dtype=torch.bfloat16),
            encoder_hidden_states=torch.randn(1, 8, 32, dtype=torch.bfloat16),
            pooled_projections=torch.randn(1, 768, dtype=torch.bfloat16),
            timestep=torch.tensor([0.5]),
            guidance=torch.tensor([3.5]),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
        ).sample
    assert 0.1 < output.float().std().item() < 10


def test_flux_dev_geometry_refuses_unknown_settings():
    with pytest.raises(ValueError, match=r"overrides=\['layers'\]: allowed are patch_size"):
        make_flux_dev_geometry("meta", layers=1)
