"""Parts of the engine: seeds, LoRA and its average, optimizers, files; the objective against diffusers."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import nn

from coat_core.linear.module import FP8Linear
from coat_flux.base.rng import Stream, mixed_seed
from coat_flux.blocks.apply import apply_coat
from coat_flux.config.coat import COATConfig
from coat_flux.config.job_sections import EMASection, NetworkKwargs, NetworkSection, TrainSection
from coat_flux.saves.errors import ResumeError
from coat_flux.saves.repair import saves_of
from coat_flux.saves.state import restore_tensors
from coat_flux.trainers.optimizer import advance, make_scheduler, restore_optimizer
from coat_flux.trainers.standalone import flow_matching, saving
from coat_flux.trainers.standalone.loading import ModelLoadError, load_encoders
from coat_flux.trainers.standalone.network import LoraEMA, add_lora, lora_targets
from coat_flux.trainers.standalone.workers import Workers
from tests import tolerances
from tests.helpers.asserts import assert_bitwise


def param(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_seeds_differ_by_seed_stream_and_index():
    seeds = {mixed_seed(s, stream, i) for s in range(4) for stream in Stream for i in range(50)}
    assert len(seeds) == 4 * len(Stream) * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- the LoRA ----------------------------------------------------------------------------------------------------------
def tiny_transformer(layers: int = 1, head_dim: int = 16, guidance: bool = True) -> FluxTransformer2DModel:
    rope = (head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8)
    sizes = {"num_layers": layers, "num_single_layers": 1, "attention_head_dim": head_dim, "num_attention_heads": 2}
    widths = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": rope}
    return FluxTransformer2DModel(**sizes, **widths, guidance_embeds=guidance).eval()


@pytest.fixture
def model() -> FluxTransformer2DModel:
    return tiny_transformer(2, 32).bfloat16()


def network(only: Any = None, ignore: Any = (), **keys: Any) -> NetworkSection:
    return NetworkSection(network_kwargs=NetworkKwargs(only, ignore), **keys)


def test_targets_are_the_linears_of_the_blocks_or_all_by_words_as_in_ai_toolkit(model):
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(lora_targets(model, network())) == {name for name in linears if "transformer_blocks." in name}
    assert set(lora_targets(model, network(transformer_only=False))) == linears
    for only, ignore, count in (
        (("transformer.single_transformer_blocks.0.",), (), 6),
        (("transformer_blocks$$1$$attn$$to_q",), (), 1),
        (("proj_out",), (), 1),
        (None, ("attn",), 28 + 6 - 16 - 3),
        (("to_q", "to_k"), ("single",), 4),
    ):
        assert len(lora_targets(model, network(only, ignore))) == count
    with pytest.raises(ValueError, match=r"only_if_contains.*34 linears.*transformer\.transformer_blocks\.0"):
        lora_targets(model, network(("to_qq",)))


def test_only_the_adapters_train_in_fp32_and_start_as_the_identity(model):
    """Of a target outside the blocks, proj_out, too, but not of all linears with that ending."""
    section = network(ignore=("single",), transformer_only=False)
    targets = lora_targets(model, section)
    assert "proj_out" in targets
    params = add_lora(model, section, 1)
    assert {name.rpartition(".lora_")[0].removeprefix("transformer.") for name in params} == set(targets)
    assert len(params) == 2 * len(targets)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in params.values()}
    assert {p.dtype for p in params.values()} == {torch.float32}
    down = params["transformer.transformer_blocks.0.ff.net.2.lora_A.weight"]
    assert down.shape == (4, 256)
    assert 0.5 / 16 < down.abs().max() <= 1 / 16
    assert all(p.count_nonzero() == 0 for name, p in params.items() if "lora_B" in name)


def test_start_values_follow_the_seed_and_peft_wraps_fp8_linears(model):
    fp8, other = copy.deepcopy(model), copy.deepcopy(model)
    apply_coat(fp8, COATConfig())
    assert lora_targets(fp8, network()) == lora_targets(model, network())
    name = "transformer.transformer_blocks.1.attn.to_v.lora_A.weight"
    plain = add_lora(model, network(), 3)[name]
    converted = add_lora(fp8, network(), 3)[name]
    reseeded = add_lora(other, network(), 4)[name]
    assert_bitwise(converted, plain)
    assert not torch.equal(reseeded, plain)
    layer = fp8.transformer_blocks[0].attn.to_q
    assert type(layer.base_layer) is FP8Linear
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert_bitwise(layer(x), layer.base_layer(x))


def test_saved_tensors_that_do_not_fit_are_refused_before_any_is_copied():
    own = {name: param(1.0, 2.0) for name in "ab"}
    saved = {name: torch.zeros(2) for name in "ab"}
    with pytest.raises(ResumeError, match=r"x\.safetensors: 1 LoRA names differ"):
        restore_tensors(own, {"a": saved["a"]}, "x.safetensors")
    with pytest.raises(ResumeError, match=r"\(3,\).*\(2,\)"):
        restore_tensors(own, saved | {"b": torch.zeros(3)}, "x.safetensors")
    assert all(tensor.all() for tensor in own.values())
    restore_tensors(own, saved, "x.safetensors")
    assert not any(tensor.any() for tensor in own.values())


# -- its average -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"use_feedback": True, "param_multiplier": 0.999})],
    ids=str,
)
def test_ema_has_the_bits_of_its_formula_and_is_taken_back_bit_for_bit(dtype, options):
    draw = torch.Generator().manual_seed(4)
    params = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((16, 20), (7,), (129, 3))]
    ema = LoraEMA({str(i): one for i, one in enumerate(params)}, EMASection(ema_decay=0.997, **options))
    shadows, copies = [one.clone() for one in ema.shadow.values()], [one.detach().clone() for one in params]
    for skipped in (None, torch.zeros(()), torch.ones(()), None):
        moves = [torch.randn(one.shape, generator=draw).to(dtype) for one in params]
        for one, other, shadow, move in zip(params, copies, shadows, moves, strict=True):
            one.data += move
            other += move
            if skipped is None or not skipped:
                delta = (shadow - other.float()) * (1.0 - 0.997)
                shadow.sub_(delta)
                if "use_feedback" in options:
                    other.add_(delta.to(dtype), alpha=10.0)
                other.mul_(options.get("param_multiplier", 1.0))
        ema.update(skipped)
    for average, shadow, one, other in zip(ema.shadow.values(), shadows, params, copies, strict=True):
        assert_bitwise(average, shadow)
        assert_bitwise(one.detach(), other)
        with ema.applied():
            assert_bitwise(one.detach(), shadow.to(dtype))
        assert_bitwise(one.detach(), other)


# -- optimizers and schedules ------------------------------------------------------------------------------------------
SCHEDULES = {
    "constant": ({}, [1, 1, 1, 1, 1]),
    "constant_with_warmup": ({"num_warmup_steps": 4}, [0, 0.25, 0.5, 0.75, 1]),
    "linear": ({}, [1 / 3, 0.5, 2 / 3, 5 / 6, 1]),
    "cosine": ({}, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
    "cosine_with_restarts": ({}, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 1]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_over_four_steps(name):
    params, wanted = SCHEDULES[name]
    rates = []
    for step in range(5):
        optimizer = torch.optim.SGD([param(1.0)], lr=1.0)
        advance(make_scheduler(name, optimizer, 4, params), step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(wanted, abs=tolerances.SIGMA_ATOL)


def test_restored_optimizer_keeps_state_and_the_configs_settings():
    weight = param(1.0)
    old = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1)
    weight.grad = torch.ones(1)
    old.step()
    new = torch.optim.AdamW([weight], lr=5e-4, weight_decay=0.2)
    saved = old.state_dict()
    saved["param_groups"][0]["initial_lr"] = 1e-3
    assert restore_optimizer(new, saved) == ["weight_decay 0.1 -> 0.2"]
    group = new.param_groups[0]
    assert (group["lr"], group["weight_decay"], "initial_lr" in group) == (5e-4, 0.2, False)
    assert_bitwise(new.state[weight]["exp_avg"], old.state[weight]["exp_avg"])


# -- files and launches ------------------------------------------------------------------------------------------------
def test_saves_are_known_by_their_names(tmp_path):
    names = [saving.save_name("run", step) for step in (500, 1000, 1500, None)]
    assert names[0] == "run_000000500.safetensors"
    for name in (*names, "run_two_000000001.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in saves_of(tmp_path, "run")] == sorted(names)
    assert set(saves_of(tmp_path, "run").values()) == {-1}  # empty files


def test_weights_come_only_from_safetensors(tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").touch()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}', encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"vae cannot be loaded .*safetensors"):
        load_encoders(str(tmp_path), torch.bfloat16)


# -- flow matching ----------------------------------------------------------------------------------------------------
FLUX_SCHEDULER = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_lognorm_blend_is_1000_descending_sigmas_a_quarter_of_them_linear():
    table = flow_matching.sigma_table("lognorm_blend", tokens=256, generator=generator())
    assert (table.shape, table.dtype) == ((1000,), torch.float32)
    assert (table.diff() <= 0).all()
    assert (table.min(), table.max()) == (0, 1)
    draws = torch.exp(0.333 * torch.randn(750, generator=generator()))
    wanted = torch.cat([1 - draws / draws.max(), torch.linspace(1.0, 0.001, 250)]).sort(descending=True).values
    assert_bitwise(table, (wanted * 1000).floor() / 1000)


@pytest.mark.parametrize(("kind", "tokens"), [("shift", 256), ("flux_shift", 1024), ("lumina2_shift", 4096)])
def test_shift_is_inferences_own_shift_by_resolution(kind, tokens):
    scheduler = FlowMatchEulerDiscreteScheduler(**FLUX_SCHEDULER)
    before = scheduler.sigmas.clone()
    table = flow_matching.sigma_table(kind, tokens=tokens, scheduler=scheduler)
    mu = torch.tensor(calculate_shift(tokens, 256, 4096, 0.5, 1.15), dtype=torch.float64)
    even = torch.linspace(1, 0.001, 1000, dtype=torch.float64)
    wanted = mu.exp() / (mu.exp() + (1 / even - 1))
    torch.testing.assert_close(table.double(), wanted, rtol=0, atol=tolerances.SIGMA_ATOL)
    assert_bitwise(scheduler.sigmas, before)


def test_linear_is_the_schedulers_training_schedule_and_sigmoid_the_logit_normal_distribution():
    table = flow_matching.sigma_table("linear", tokens=1)
    torch.testing.assert_close(table, FlowMatchEulerDiscreteScheduler().sigmas, rtol=0, atol=tolerances.SIGMA_ATOL)
    logits = torch.logit(flow_matching.sigma_table("sigmoid", tokens=1, generator=generator()).double())
    bound = tolerances.STOCHASTIC_SIGMAS / 1000**0.5
    assert abs(logits.mean()) < bound
    assert abs(logits.std() - 1) < bound


def test_balanced_draw_is_uniform_below_max_and_that_index_where_min_is_max():
    train = TrainSection(min_denoising_steps=100, max_denoising_steps=200)
    indices = flow_matching.draw_indices(train, 20_000, generator())
    assert (indices.min(), indices.max()) == (100, 199)
    counts = torch.bincount(indices - 100, minlength=100).double()
    assert (counts - 200).abs().max() < tolerances.STOCHASTIC_SIGMAS * 200**0.5
    train = TrainSection(min_denoising_steps=300, max_denoising_steps=300)
    assert flow_matching.draw_indices(train, 5).tolist() == [300] * 5


def test_content_draws_high_noise_and_style_low_within_the_range():
    table = flow_matching.sigma_table("linear", tokens=1)
    for kind, mean in (("content", 0.75), ("style", 0.25)):
        indices = flow_matching.draw_indices(TrainSection(content_or_style=kind), 20_000, generator())
        assert table[indices].mean() == pytest.approx(mean, abs=tolerances.CUBIC_MEAN_ATOL)
        train = TrainSection(content_or_style=kind, min_denoising_steps=100, max_denoising_steps=200)
        indices = flow_matching.draw_indices(train, 20_000, generator())
        assert (indices.min(), indices.max()) == (100, 200)


def test_step_types_use_evenly_spaced_indices():
    for kind, wanted in (("one_step", [0]), ("four_step", [0, 250, 500, 750])):
        indices = flow_matching.draw_indices(TrainSection(timestep_type=kind), 200, generator())
        assert sorted(set(indices.tolist())) == wanted


def test_weights_are_a_bell_of_mean_one_or_its_half():
    bell = flow_matching.timestep_weights(TrainSection(linear_timesteps=True))
    half = flow_matching.timestep_weights(TrainSection(linear_timesteps2=True))
    assert bell.mean() == pytest.approx(1)
    assert bell.argmax() == 500
    assert bell[0] == 0
    assert_bitwise(half[:500], bell[:500])
    assert (half[500:] == bell.max()).all()
    weights = flow_matching.timestep_weights(TrainSection(timestep_type="weighted"))
    assert weights.mean() == pytest.approx(1, abs=1e-3)
    assert weights.argmax() == 124


LOSSES = {"mse": lambda d: d**2, "mae": torch.abs, "pseudo_huber": lambda d: (d**2 + 1e-4).sqrt() - 0.01}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_are_per_sample_weighted_and_masked(kind):
    prediction, latents, noise = torch.randn(3, 2, 4, 8, 8)
    weights, mask = torch.tensor([0.5, 2.0]), torch.rand(2, 1, 8, 8)
    errors = LOSSES[kind](prediction - (noise - latents))
    for options, factor in (({}, 1), ({"weights": weights}, weights.view(2, 1, 1, 1)), ({"mask": mask}, mask)):
        losses = flow_matching.sample_losses(prediction, latents, noise, loss_type=kind, **options)
        torch.testing.assert_close(losses, (errors * factor).mean(dim=(1, 2, 3)), rtol=1e-5, atol=1e-7)


def objective_loss(model: FluxTransformer2DModel, **train: Any) -> float:
    batch = {"latents": torch.ones(2, 4, 8, 8), "prompt_embeds": torch.ones(2, 4, 32), "pooled": torch.ones(2, 16)}
    scheduler = FlowMatchEulerDiscreteScheduler(**FLUX_SCHEDULER)
    return flow_matching.Objective(model, TrainSection(**train), scheduler, 0, torch.float32)(batch, 3).item()


def test_settings_of_the_loss_reach_it():
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
def test_weighted_and_bypass_are_ai_toolkits(tmp_path):
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
    torch.testing.assert_close(flow_matching.sigma_table("weighted", tokens=1), times, rtol=2**-23, atol=0)
    error = flow_matching.timestep_weights(TrainSection(timestep_type="weighted")) / counts - 1
    assert error.abs().max() < tolerances.WEIGHTED_TIMESTEPS_MAX
    assert error.square().mean().sqrt() < tolerances.WEIGHTED_TIMESTEPS_RMS
    with torch.no_grad(), flow_matching.bypassed_guidance(model):
        ours = model(**inputs, return_dict=False)[0]
    with torch.no_grad():
        guided = model(**inputs, return_dict=False)[0]
    assert_bitwise(ours, expected)
    assert not torch.equal(guided, expected)


@torch.no_grad()
def test_the_prediction_sees_the_schedulers_scale_noise():
    scheduler, model = FlowMatchEulerDiscreteScheduler(), tiny_transformer()
    latents, noise = torch.randn(2, 3, 4, 8, 8)
    texts = torch.randn(3, 5, 32), torch.randn(3, 16)
    indices = [10, 500, 999]
    x_t, sigmas = scheduler.scale_noise(latents, scheduler.timesteps[indices], noise), scheduler.sigmas[indices]
    velocity = flow_matching.predict_velocity(model, x_t, sigmas, *texts, dtype=torch.float32)
    drawn = {"latents": latents, "noise": noise, "sigmas": sigmas, "prompt_embeds": texts[0], "pooled": texts[1]}
    bounds = {"rtol": tolerances.FP32_ORDER_RTOL, "atol": tolerances.FP32_ORDER_ATOL}
    losses = flow_matching.losses_of(model, {**drawn, "mask": torch.ones(3, 1, 8, 8)}, torch.float32)
    torch.testing.assert_close(losses, flow_matching.sample_losses(velocity, latents, noise), **bounds)
    weighted = flow_matching.losses_of(model, {**drawn, "weights": torch.full((3,), 2.0)}, torch.float32)
    torch.testing.assert_close(weighted, 2 * losses, **bounds)


@pytest.mark.parametrize("guidance", [True, False])
def test_prediction_is_what_the_pipeline_would_compute(guidance):
    model = tiny_transformer(guidance=guidance)
    x_t, sigmas = torch.randn(2, 4, 6, 8), torch.tensor([0.3, 0.8])
    embeds, pooled = torch.randn(2, 5, 32), torch.randn(2, 16)
    with torch.no_grad():
        out = flow_matching.predict_velocity(model, x_t, sigmas, embeds, pooled, dtype=torch.float32)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that must be missing")
def test_missing_gpu_is_said(caplog):
    workers = Workers("cuda:0")
    assert (workers.device, workers.rank, workers.size, workers.is_main) == (torch.device("cpu"), 0, 1, True)
    assert "device=cuda:0" in caplog.text
    workers.close()
