"""Predicted bytes against measured ones: what whole models keep for backward, what a run allocates and writes."""

import contextlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel
from torch import nn

from coat_core.optim import FP8AdamW
from coat_core.optim.state import state_bytes
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.counted import CountedBlock, Probe
from coat_flux.blocks.decide import Given, flow_settings
from coat_flux.blocks.fused import chooser
from coat_flux.blocks.held import HeldTensors
from coat_flux.blocks.lora import attach_lora
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import FlowSettings, Tokens, UnknownBlock, block_bytes, largest_moment, read_block
from coat_flux.cli.entry import main
from coat_flux.config.check import job_for_plan
from coat_flux.config.coat import COATConfig
from coat_flux.config.job import JobConfig
from coat_flux.config.job_sections import NetworkKwargs, NetworkSection
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import optimizer_bytes, predict
from coat_flux.trainers.full import Chosen, UpdateInBackward
from coat_flux.trainers.optimizer import make_optimizer
from coat_flux.trainers.standalone.loading import load_transformer
from coat_flux.trainers.standalone.network import add_lora, lora_targets
from coat_flux.trainers.standalone.trainer import COATTrainer
from scripts.bench_memory import kept_bytes as measured_kept_bytes
from tests.architecture.sources import ROOT
from tests.helpers.engine_job import engine_job
from tests.helpers.plan_models import folder_of, job_of, measure
from tests.helpers.toolkit_lora import ROOT_VARIABLE
from tests.tolerances import PLAN_FULL_RTOL, PLAN_KEPT_RTOL, PLAN_MODELS_RTOL, PLAN_MOMENT_RTOL


def flux_model(
    coat: COATConfig, heads: int, head_dim: int, blocks: tuple[int, int], rank: int, words: list[str] | None = None
) -> nn.Module:
    """A FLUX transformer with random weights under COAT, LoRA on the linears whose names contain one of the words."""
    model = flux_transformer(heads, head_dim, blocks).to(torch.bfloat16).requires_grad_(False)
    apply_coat(model, coat, device=next(model.parameters()).device)
    only = None if words is None else tuple(words)
    add_lora(model, NetworkSection(linear=rank, network_kwargs=NetworkKwargs(only_if_contains=only)), 0)
    if coat.enabled:
        attach_lora(model, coat)
    return model.train()


def flux_transformer(heads: int, head_dim: int, blocks: tuple[int, int]) -> nn.Module:
    axis = (head_dim - head_dim // 8) // 2
    sizes = {"num_layers": blocks[0], "num_single_layers": blocks[1], "attention_head_dim": head_dim}
    sizes |= {"num_attention_heads": heads, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    return FluxTransformer2DModel(**sizes, guidance_embeds=True, axes_dims_rope=(head_dim // 8, axis, axis))


def flux_inputs(tokens: Tokens, device: str = "cpu") -> dict[str, Any]:
    size = {"dtype": torch.bfloat16, "device": device}
    return {
        "hidden_states": torch.zeros(tokens.batch, tokens.image, 64, **size),
        "encoder_hidden_states": torch.zeros(tokens.batch, tokens.text, 64, **size),
        "pooled_projections": torch.zeros(tokens.batch, 64, **size),
        "timestep": torch.full((tokens.batch,), 0.5, device=device),
        "guidance": torch.ones(tokens.batch, device=device),
        "img_ids": torch.zeros(tokens.image, 3, device=device),
        "txt_ids": torch.zeros(tokens.text, 3, device=device),
        "return_dict": False,
    }


def predicted(model: Any, tokens: Tokens, settings: FlowSettings) -> tuple[int, int]:
    """Bytes that the model keeps for backward, and the most at one moment of a step."""
    runner, blocks = BlockRunner.of(model), []
    for module in [*model.transformer_blocks, *model.single_transformer_blocks]:
        blocks.append(read_block(module, blocks[-1].trained_output if blocks else False))
    recomputed = [] if runner is None else runner.plan.recomputed or []
    sizes = [block_bytes(block, tokens, settings) for block in blocks]
    kept = sum(size.recomputed if i in recomputed else size.kept for i, size in enumerate(sizes))
    around = blocks[-1].around(tokens, settings)
    return kept + around, largest_moment(sizes, recomputed).total + around


NONE, ALL = {"checkpointing": "none"}, {"checkpointing": "all"}
BF16_ATTENTION = {"attention": "bf16", "group_size": 32}
ROWS = {"flow": "generic", "attention": "bf16", "group_size": 16, "linear_granularity": "per_row"}
# coat: → heads, their width, double and single blocks, rank, names of the linears with LoRA; the tokens
CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...], Tokens]] = {
    "bf16": ({"enabled": False}, (4, 64, (1, 2), 8), Tokens(1, 16, 48)),
    "fused, rank 16, heads of 128, batch 2": ({"memory": NONE}, (3, 128, (1, 2), 16), Tokens(2, 16, 48)),
    "fused, attention bf16, groups of 32, single blocks trained alone": (
        {"memory": NONE, "activation": BF16_ATTENTION},
        (4, 64, (1, 2), 32, ["single_transformer_blocks"]),
        Tokens(1, 16, 40),
    ),
    "generic, attention bf16, groups of 16, rows": (
        {"memory": NONE, "activation": ROWS}, (4, 64, (1, 1), 16, ["attn", "proj_out"]), Tokens(1, 20, 60),
    ),
    "generic, weights in bf16": (
        {"memory": NONE, "activation": {"flow": "generic"}, "weight": {"use_fp8": False}},
        (4, 64, (1, 1), 8),
        Tokens(1, 16, 48),
    ),
    "all recompute from FP8 inputs": (
        {"memory": {"checkpointing": "all"}, "activation": {"group_size": 32}}, (3, 128, (1, 2), 8), Tokens(2, 16, 36),
    ),
    "all recompute from bf16 inputs": (
        {"memory": {"checkpointing": "all", "enable_efficient_checkpoint": False}},
        (4, 64, (1, 2), 8),
        Tokens(2, 16, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_saved_activations_are_as_predicted(name):
    block, sizes, tokens = CASES[name]
    coat = COATConfig.from_dict(block)
    model, inputs = flux_model(coat, *sizes), flux_inputs(tokens)
    for _ in range(2):  # weights are joined and adapters copied, in memory of their own
        model(**inputs)
    measured = measured_kept_bytes(lambda: model(**inputs))
    kept, _ = predicted(model, tokens, flow_settings(coat, Given((), device="cpu")))
    assert kept == pytest.approx(measured, rel=PLAN_KEPT_RTOL)


@pytest.fixture
def meta_as_gpu(monkeypatch):
    """Lets whole models run on the meta device: no autocast there, attention by its kernel, no comparison of values."""
    autocast, enabled = torch.autocast, torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: kind != "meta" and enabled(kind))
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **kw: contextlib.nullcontext() if kind == "meta" else autocast(kind, **kw)
    )
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda query, key, value, **_: kernel(query, key, value)[0]
    )
    monkeypatch.setattr(chooser, "relative_difference", lambda *_: 0.0)
    monkeypatch.setattr("coat_core.ops.attention.chosen_kernel", lambda *_: "flash_cpu")


@pytest.mark.parametrize(
    "block", [{"enabled": False}, {"memory": NONE}, {"memory": ALL}, {"memory": ALL, "weight": {"format": "nvfp4"}}]
)
@pytest.mark.usefixtures("meta_as_gpu")
def test_largest_moment_of_a_step_is_as_predicted(block):
    """A whole forward and backward pass at FLUX.1's width, counted on the meta device, where every lifetime is real."""
    coat, tokens = COATConfig.from_dict(block), Tokens(1, 512, 2304)
    with torch.device("meta"):
        model = flux_model(coat, heads=24, head_dim=128, blocks=(1, 4), rank=16)
    model.pos_embed.forward = lambda ids: tuple(torch.empty(len(ids), 128, device="meta") for _ in range(2))
    inputs = flux_inputs(tokens, "meta")
    model(**inputs)[0].sum().backward()  # the first pass also compares
    model.zero_grad(set_to_none=True)
    with HeldTensors() as held:
        model(**inputs)[0].sum().backward()
    settings = flow_settings(coat, Given((), device="cpu"))
    _, peak = predicted(model, tokens, replace(settings, kernels=True))  # on meta nothing runs inside an operator
    assert peak == pytest.approx(held.peak, rel=PLAN_MOMENT_RTOL)


FULL = {"memory": ALL, "activation": {"flow": "generic"}}


@pytest.mark.parametrize(("device", "frees"), [("meta", True), ("meta", False), ("cpu", True)])
@pytest.mark.usefixtures("meta_as_gpu")
def test_bytes_of_full_fine_tuning_are_as_predicted(device, frees):
    """A step at FLUX.1's width: weights, codes, moments, the largest gradient or all, and saved activations."""
    coat, tokens = COATConfig.from_dict(FULL), Tokens(1, 64, 192) if device == "cpu" else Tokens(1, 512, 2304)
    with torch.device(device):
        model = flux_transformer(*((4, 128, (1, 1)) if device == "cpu" else (24, 128, (1, 4)))).to(torch.bfloat16)
    chosen = Chosen(coat)
    apply_coat(model, coat, trained=chosen.find(model))
    params = chosen.train(model.train())
    runner = BlockRunner.of(model)
    assert runner is not None
    runner.expect(frees_gradients=frees)
    model.pos_embed.forward = lambda ids: tuple(torch.empty(len(ids), 128, device=device) for _ in range(2))
    optimizer = FP8AdamW(params.values(), lr=1e-5, capturable=device == "meta")  # which never asks what is finite
    fused = UpdateInBackward(optimizer, list(params.values()), 1e9, lambda: None) if frees else None
    inputs = flux_inputs(tokens, device)

    def step() -> None:
        loss = model(**inputs)[0].sum()
        with fused.updating(torch.zeros(())) if fused is not None else contextlib.nullcontext():
            loss.backward()
        if fused is None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    step()  # makes the states
    with HeldTensors() as held:
        step()
    measured = sum(x.nbytes for x in [*model.parameters(), *model.buffers()]) + optimizer.state_bytes() + held.peak
    settings = replace(flow_settings(coat, Given((), device="cpu", frees_gradients=frees)), kernels=True)
    elements = [param.numel() for param in params.values()]
    _, peak = predicted(model, tokens, settings)
    whole = peak + 2 * sum(elements) + state_bytes(coat.optimizer_config()[0], elements)
    assert len(params) == len(list(model.parameters()))
    assert whole == pytest.approx(measured, rel=PLAN_FULL_RTOL)


@pytest.mark.parametrize(
    ("optimizer", "coat"),
    [
        ("coat_fp8_adamw", {}),
        ("coat_fp8_adamw", {"optimizer": {"use_fp8_m2": False, "block_size": 16}}),
        ("coat_fp8_adamw", {"optimizer": {"use_dynamic_range_expansion": False}, "weight": {"granularity": "per_row"}}),
        ("coat_fp8_adamw", {"weight": {"format": "nvfp4"}}),
        ("coat_fp8_adamw", {"weight": {"format": "int8"}, "activation": {"format": "int8"}}),
        ("adamw", None),
    ],
)
def test_exact_bytes_of_a_run(place, optimizer, coat):
    """Transformer, adapters and optimizer states of a real model after a step, byte for byte."""
    raw = engine_job("run", **place, coat=coat, train={"optimizer": optimizer}, network={"linear": 6})
    job = JobConfig.from_dict(raw)
    facts = JobFacts(job)
    model = load_transformer(str(place["model"]), torch.bfloat16)
    assert facts.targets == lora_targets(model, job.network)
    if job.coat.enabled:
        apply_coat(model, job.coat)
    assert facts.transformer_bytes == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])

    lora = list(add_lora(model, job.network, 0).values())
    assert facts.lora_bytes == sum(param.nbytes for param in lora)

    made = make_optimizer(optimizer, lora, 1e-3, job.coat, {})
    for param in lora:
        param.grad = torch.ones_like(param)
    made.step()
    states = [value for state in made.state.values() for key, value in state.items() if key != "step"]
    assert optimizer_bytes(facts) == sum(value.nbytes for value in states)
    assert isinstance(made, FP8AdamW) == (optimizer == "coat_fp8_adamw")


def test_disk_of_a_run(place, monkeypatch):
    """What the run's folder and the caches hold after training: files as predicted, but for their headers."""
    monkeypatch.setattr("coat_flux.plan.job.TEXT_TOKENS", 16)
    raw = engine_job(
        "run", **place, coat={}, train={"steps": 3}, network={"linear": 64},
        save={"save_every": 1, "max_step_saves_to_keep": 2},
        dataset={"cache_latents_to_disk": True, "caption_dropout_rate": 0.5},
    )  # fmt: skip
    job = JobConfig.from_dict(raw)
    facts = JobFacts(job)
    predicted_bytes = predict(facts).disk_bytes
    COATTrainer(job).train()
    found = [path for folder in (place["images"], place["out"]) for path in folder.rglob("*") if path.is_file()]
    files = [path for path in found if path.suffix in (".safetensors", ".pt")]
    sizes = {path.stat().st_ino: path.stat().st_size for path in files}  # published files are links into the set
    headers = 700 * len(facts.adapter_sizes) * len(sizes)  # names and shapes of the tensors in each file
    written = facts.lora_bytes + optimizer_bytes(facts) + facts.lora_bytes // 2  # there only while a save is written
    assert 0 <= sum(sizes.values()) - (predicted_bytes - written) <= headers


# -- models of many families, and where their configs come from -------------------------------------------------------
COUNTED = ("chroma", "zimage", "wan21", "lumina2", "cogview4")  # the page has all, in minutes
QTYPES = ("qfloat8", "uint4", "convrot8", "nvfp4")


def assert_as_counted(row: dict[str, Any]) -> None:
    assert row["weights"] == pytest.approx(row["weights_counted"], rel=PLAN_MODELS_RTOL)
    assert row["saved"] == pytest.approx(row["saved_counted"], rel=PLAN_MODELS_RTOL)


@pytest.mark.parametrize("arch", COUNTED)
def test_bytes_are_those_counted(arch, tmp_path):
    row = measure(arch, tmp_path / "model")
    assert_as_counted(row)
    assert ["taken to be diffusers'" in line for line in row["assumed"]] == [True] * (arch == "chroma")


@pytest.mark.aitk
def test_bases_that_ai_toolkit_quantizes():
    arguments = [word for qtype in QTYPES for word in ("--qtype", qtype)]
    command = [os.environ["AI_TOOLKIT_PYTHON"], "-m", "tests.helpers.plan_models", "qwen_image", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (os.environ[ROOT_VARIABLE], done.stderr[-2000:])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["qtype"] for row in rows] == list(QTYPES)
    for row in rows:
        assert_as_counted(row)


def facts_of(arch: str, folder: Path) -> JobFacts:
    return JobFacts(job_for_plan(job_of(arch, folder, "", "none")))


def test_of_two_transformers_one_saves_and_both_are_held(tmp_path):
    folder, _, _ = folder_of("wan21", tmp_path / "model")
    one = facts_of("wan21", folder)
    (folder / "transformer_2").mkdir()
    (folder / "transformer_2" / "config.json").write_bytes((folder / "transformer" / "config.json").read_bytes())
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer_2": index["transformer"]}))
    both = facts_of("wan22_14b", folder)
    assert (both.transformer_bytes, both.lora_bytes) == (2 * one.transformer_bytes, 2 * one.lora_bytes)
    saved = [predict(facts).phases["step"]["saved activations"] for facts in (one, both)]
    assert saved[0] == pytest.approx(saved[1], rel=0.01)
    assert len(both.blocks) == 2 * len(one.blocks)


def test_what_does_not_run_without_weights_is_assumed_and_named(tmp_path, monkeypatch):
    folder, _, _ = folder_of("cogview4", tmp_path / "model")
    assert {type(block) for block in facts_of("cogview4", folder).blocks} == {CountedBlock}

    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("Cannot copy out of meta tensor")

    monkeypatch.setattr(Probe, "inputs", fails)
    monkeypatch.setattr("coat_flux.plan.job.largest_held", fails)
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sample_size": 64}))  # no part that is known
    facts = facts_of("cogview4", folder)
    assert {type(block) for block in facts.blocks} == {UnknownBlock}
    for kind in ("CogView4Transformer2DModel", "CLIPTextModel", "AutoencoderKL"):
        assert any(line.startswith(kind) for line in predict(facts).assumptions), kind


def test_the_command_takes_a_job_of_ai_toolkit(tmp_path, capsys):
    folder, _, _ = folder_of("wan21", tmp_path / "model")
    raw = job_of("wan21", folder, "uint4", "auto")
    raw["config"]["process"][0]["train"]["noise_scheduler"] = "ddpm"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(raw))
    assert main(["plan", str(file), "--gpu", "24"]) == 0
    printed = capsys.readouterr().out
    assert "WanTransformerBlock" in printed
    assert "train.noise_scheduler" in printed
    part = folder / "transformer" / "config.json"
    part.write_text(json.dumps({**json.loads(part.read_text()), "_class_name": "NewTransformer"}))
    assert main(["plan", str(file)]) != 0
    assert "NewTransformer" in capsys.readouterr().err
