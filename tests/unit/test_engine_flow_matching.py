"""The flow-matching objective against diffusers' scheduler and pipeline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from coat_flux.config.job_sections import TrainSection
from coat_flux.trainers.standalone.flow_matching import (
    Objective,
    bypassed_guidance,
    draw_indices,
    losses_of,
    predict_velocity,
    sample_losses,
    sigma_table,
    timestep_weights,
)
from tests import tolerances
from tests.helpers.asserts import assert_bitwise

FLUX_SCHEDULER = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}


def tiny_transformer(guidance: bool = True) -> FluxTransformer2DModel:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    widths = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)}
    return FluxTransformer2DModel(**sizes, **widths, guidance_embeds=guidance).eval()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_lognorm_blend_is_1000_descending_sigmas_a_quarter_of_them_linear() -> None:
    table = sigma_table("lognorm_blend", tokens=256, generator=generator())
    assert (table.shape, table.dtype) == ((1000,), torch.float32)
    assert (table.diff() <= 0).all()
    assert (table.min(), table.max()) == (0, 1)
    draws = torch.exp(0.333 * torch.randn(750, generator=generator()))
    wanted = torch.cat([1 - draws / draws.max(), torch.linspace(1.0, 0.001, 250)]).sort(descending=True).values
    assert_bitwise(table, (wanted * 1000).floor() / 1000)


def test_linear_table_is_the_schedulers_training_schedule() -> None:
    table = sigma_table("linear", tokens=1)
    torch.testing.assert_close(table, FlowMatchEulerDiscreteScheduler().sigmas, rtol=0, atol=tolerances.SIGMA_ATOL)


@pytest.mark.parametrize(("kind", "tokens"), [("shift", 256), ("flux_shift", 1024), ("lumina2_shift", 4096)])
def test_shift_is_inferences_own_shift_by_resolution(kind: str, tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**FLUX_SCHEDULER)
    before = scheduler.sigmas.clone()
    table = sigma_table(kind, tokens=tokens, scheduler=scheduler)
    mu = torch.tensor(calculate_shift(tokens, 256, 4096, 0.5, 1.15), dtype=torch.float64)
    even = torch.linspace(1, 0.001, 1000, dtype=torch.float64)
    wanted = mu.exp() / (mu.exp() + (1 / even - 1))
    torch.testing.assert_close(table.double(), wanted, rtol=0, atol=tolerances.SIGMA_ATOL)
    assert_bitwise(scheduler.sigmas, before)


def test_static_shift_where_the_scheduler_has_one() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    table = sigma_table("shift", tokens=256, scheduler=scheduler)
    even = torch.linspace(float(scheduler.sigma_max), float(scheduler.sigma_min), 1000)
    torch.testing.assert_close(table, 3 * even / (1 + 2 * even), rtol=0, atol=tolerances.SIGMA_ATOL)


def test_sigmoid_is_the_logit_normal_distribution() -> None:
    table = sigma_table("sigmoid", tokens=1, generator=generator())
    logits = torch.logit(table.double())
    bound = tolerances.STOCHASTIC_SIGMAS / 1000**0.5
    assert abs(logits.mean()) < bound
    assert abs(logits.std() - 1) < bound


def test_balanced_draw_is_uniform_below_max_and_that_index_where_min_is_max() -> None:
    train = TrainSection(min_denoising_steps=100, max_denoising_steps=200)
    indices = draw_indices(train, 20_000, generator())
    assert (indices.min(), indices.max()) == (100, 199)
    counts = torch.bincount(indices - 100, minlength=100).double()
    assert (counts - 200).abs().max() < tolerances.STOCHASTIC_SIGMAS * 200**0.5
    train = TrainSection(min_denoising_steps=300, max_denoising_steps=300)
    assert draw_indices(train, 5).tolist() == [300] * 5


def test_content_draws_high_noise_and_style_low_within_the_range() -> None:
    table = sigma_table("linear", tokens=1)
    for kind, mean in (("content", 0.75), ("style", 0.25)):
        indices = draw_indices(TrainSection(content_or_style=kind), 20_000, generator())
        assert table[indices].mean() == pytest.approx(mean, abs=tolerances.CUBIC_MEAN_ATOL)
        train = TrainSection(content_or_style=kind, min_denoising_steps=100, max_denoising_steps=200)
        indices = draw_indices(train, 20_000, generator())
        assert (indices.min(), indices.max()) == (100, 200)


def test_step_types_use_evenly_spaced_indices() -> None:
    for kind, wanted in (("one_step", [0]), ("four_step", [0, 250, 500, 750])):
        indices = draw_indices(TrainSection(timestep_type=kind), 200, generator())
        assert sorted(set(indices.tolist())) == wanted


def test_weights_are_a_bell_of_mean_one_or_its_half() -> None:
    bell = timestep_weights(TrainSection(linear_timesteps=True))
    half = timestep_weights(TrainSection(linear_timesteps2=True))
    assert bell.mean() == pytest.approx(1)
    assert bell.argmax() == 500
    assert bell[0] == 0
    assert_bitwise(half[:500], bell[:500])
    assert (half[500:] == bell.max()).all()
    weights = timestep_weights(TrainSection(timestep_type="weighted"))
    assert weights.mean() == pytest.approx(1, abs=1e-3)
    assert weights.argmax() == 124


LOSSES = {"mse": lambda d: d**2, "mae": torch.abs, "pseudo_huber": lambda d: (d**2 + 1e-4).sqrt() - 0.01}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_are_per_sample_weighted_and_masked(kind: str) -> None:
    prediction, latents, noise = torch.randn(3, 2, 4, 8, 8)
    weights, mask = torch.tensor([0.5, 2.0]), torch.rand(2, 1, 8, 8)
    errors = LOSSES[kind](prediction - (noise - latents))
    for options, factor in (({}, 1), ({"weights": weights}, weights.view(2, 1, 1, 1)), ({"mask": mask}, mask)):
        losses = sample_losses(prediction, latents, noise, loss_type=kind, **options)
        torch.testing.assert_close(losses, (errors * factor).mean(dim=(1, 2, 3)), rtol=1e-5, atol=1e-7)


def objective_loss(model: FluxTransformer2DModel, **train: Any) -> float:
    """The objective's own loss of two samples, batch number 3 of a run."""
    batch = {"latents": torch.ones(2, 4, 8, 8), "prompt_embeds": torch.ones(2, 4, 32), "pooled": torch.ones(2, 16)}
    scheduler = FlowMatchEulerDiscreteScheduler(**FLUX_SCHEDULER)
    return Objective(model, TrainSection(**train), scheduler, 0, torch.float32)(batch, 3).item()


def test_settings_of_the_loss_reach_it() -> None:
    model = tiny_transformer()
    settings = [{}, {"loss_type": "mae"}, {"loss_type": "pseudo_huber"}, {"timestep_type": "linear"}]
    settings += [{"timestep_type": "weighted"}, {"linear_timesteps": True}, {"bypass_guidance_embedding": True}]
    assert len({objective_loss(model, **train) for train in settings}) == len(settings)
    schnell = tiny_transformer(guidance=False)
    assert objective_loss(schnell, bypass_guidance_embedding=True) == objective_loss(schnell)


HOST = """
import sys, torch
from diffusers import FluxTransformer2DModel
from toolkit.models.flux import bypass_flux_guidance
from toolkit.samplers.custom_flowmatch_sampler import CustomFlowMatchEulerDiscreteScheduler as Scheduler
config, weights, inputs = torch.load(sys.argv[1])
model = FluxTransformer2DModel(**config).eval()
model.load_state_dict(weights)
bypass_flux_guidance(model)
scheduler = Scheduler()
times = scheduler.set_train_timesteps(1000, "cpu", timestep_type="weighted")
counts = scheduler.get_weights_for_timesteps(times, timestep_type="weighted")
with torch.no_grad():
    torch.save((times / 1000, counts, model(**inputs, return_dict=False)[0]), sys.argv[2])
"""


@pytest.mark.aitk
def test_weighted_and_bypass_are_ai_toolkits(tmp_path: Path) -> None:
    model = tiny_transformer()
    inputs = {"hidden_states": torch.randn(2, 6, 16), "encoder_hidden_states": torch.randn(2, 4, 32)}
    inputs |= {"pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([0.3, 0.9])}
    inputs |= {"txt_ids": torch.zeros(4, 3), "img_ids": torch.zeros(6, 3), "guidance": torch.ones(2)}
    config = {key: model.config[key] for key in model.config if not key.startswith("_")}
    torch.save((config, model.state_dict(), inputs), tmp_path / "in.pt")
    python = os.environ.get("AI_TOOLKIT_PYTHON", sys.executable)
    command = [python, "-c", HOST, str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, cwd=os.environ["AI_TOOLKIT_ROOT"], check=True, capture_output=True)
    times, counts, expected = torch.load(tmp_path / "out.pt")
    torch.testing.assert_close(sigma_table("weighted", tokens=1), times, rtol=2**-23, atol=0)
    error = timestep_weights(TrainSection(timestep_type="weighted")) / counts - 1
    assert error.abs().max() < tolerances.WEIGHTED_TIMESTEPS_MAX
    assert error.square().mean().sqrt() < tolerances.WEIGHTED_TIMESTEPS_RMS
    with torch.no_grad(), bypassed_guidance(model):
        ours = model(**inputs, return_dict=False)[0]
    with torch.no_grad():
        guided = model(**inputs, return_dict=False)[0]
    assert_bitwise(ours, expected)
    assert not torch.equal(guided, expected)


@torch.no_grad()
def test_the_prediction_sees_the_schedulers_scale_noise() -> None:
    scheduler, model = FlowMatchEulerDiscreteScheduler(), tiny_transformer()
    latents, noise = torch.randn(2, 3, 4, 8, 8)
    texts = torch.randn(3, 5, 32), torch.randn(3, 16)
    indices = [10, 500, 999]
    x_t, sigmas = scheduler.scale_noise(latents, scheduler.timesteps[indices], noise), scheduler.sigmas[indices]
    velocity = predict_velocity(model, x_t, sigmas, *texts, dtype=torch.float32)
    drawn = {"latents": latents, "noise": noise, "sigmas": sigmas, "prompt_embeds": texts[0], "pooled": texts[1]}
    bounds = {"rtol": tolerances.FP32_ORDER_RTOL, "atol": tolerances.FP32_ORDER_ATOL}
    losses = losses_of(model, {**drawn, "mask": torch.ones(3, 1, 8, 8)}, torch.float32)
    torch.testing.assert_close(losses, sample_losses(velocity, latents, noise), **bounds)
    weighted = losses_of(model, {**drawn, "weights": torch.full((3,), 2.0)}, torch.float32)
    torch.testing.assert_close(weighted, 2 * losses, **bounds)


@pytest.mark.parametrize("guidance", [True, False])
def test_prediction_is_what_the_pipeline_would_compute(guidance: bool) -> None:
    model = tiny_transformer(guidance)
    x_t, sigmas = torch.randn(2, 4, 6, 8), torch.tensor([0.3, 0.8])
    embeds, pooled = torch.randn(2, 5, 32), torch.randn(2, 16)
    with torch.no_grad():
        out = predict_velocity(model, x_t, sigmas, embeds, pooled, dtype=torch.float32)
        by_hand = model(
            hidden_states=FluxPipeline._pack_latents(x_t, 2, 4, 6, 8),
            timestep=sigmas,
            guidance=torch.ones(2) if guidance else None,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(5, 3),
            img_ids=torch.tensor([[0.0, row, column] for row in range(3) for column in range(4)]),
        ).sample
    assert out.shape == x_t.shape
    assert_bitwise(FluxPipeline._pack_latents(out, 2, 4, 6, 8), by_hand)
