"""Bytes that `coat-flux plan` predicts for small models of many families, and those counted in a pass: docs/memory.md.

One JSON object a line, --table for the rows of a page. --qtype, of bases that ai-toolkit quantizes, in its environment.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from scripts.bench_memory import kept_bytes
from tests.helpers.aitk_models import MODELS, SIDE, TEXT, chroma_of_diffusers, draw_weights, in_bf16, quantize_as_host

# more blocks than the helper's models have: in a model's last block some streams end, and with them what they save
LAYERS = {"num_layers": 6, "num_single_layers": 6, "n_layers": 6}
VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [32] * 4, "latent_channels": 4,
}  # fmt: skip
CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 2, "vocab_size": 128}
PARTS = {
    "vae": ("AutoencoderKL", VAE),
    "text_encoder": ("CLIPTextModel", CLIP),
    "text_encoder_2": ("T5EncoderModel", T5),
}
ARCHS = ("flux", "chroma", "qwen_image", "zimage", "sd3", "wan21", "lumina2", "cogview4", "auraflow", "sdxl")


def folder_of(arch: str, root: Path) -> tuple[Path, nn.Module, dict[str, Any]]:
    """A diffusers folder without weights; the real model of its config, drawn, and its inputs."""
    made, inputs = chroma_of_diffusers() if arch == "chroma" else MODELS[arch]()
    config = {key: LAYERS.get(key, value) for key, value in made.config.items() if not key.startswith("_")}
    torch.manual_seed(0)
    model = type(made).from_config(config)
    name = "unet" if arch == "sdxl" else "transformer"
    parts = {name: (type(model).__name__, {**config, "_class_name": type(model).__name__}), **PARTS}
    for part, (_, content) in parts.items():
        (root / part).mkdir(parents=True)
        (root / part / "config.json").write_text(json.dumps(content))
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": TEXT}))
    index = {part: ("library", kind) for part, (kind, _) in parts.items()} | {"tokenizer": ("transformers", "")}
    (root / "model_index.json").write_text(json.dumps(index))
    if "sample" in inputs:
        inputs["sample"] = inputs["sample"][:, :, : 2 * SIDE, : 2 * SIDE]
    return root, model, inputs


def job_of(arch: str, folder: Path, qtype: str, checkpointing: str) -> dict[str, Any]:
    process = {
        "type": "coat_flux_trainer", "training_folder": "output", "device": "cpu",
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "datasets": [{"folder_path": "not here", "resolution": [16 * SIDE]}],
        "train": {"batch_size": 1, "dtype": "bf16", "optimizer": "adamw", "disable_sampling": True},
        "model": {"name_or_path": str(folder), "arch": arch},
        "coat": {"memory": {"checkpointing": checkpointing}, "speed": {"measure": "never"}},
    }  # fmt: skip
    if qtype:
        process["model"] |= {"quantize": True, "qtype": qtype}  # type: ignore[operator]
    return {"job": "extension", "config": {"name": "run", "process": [process]}}


def measure(arch: str, root: Path, qtype: str = "", checkpointing: str = "none") -> dict[str, Any]:
    """Predicted and counted bytes of the transformer's weights, and of what a pass saves for backward."""
    from peft import LoraConfig, inject_adapter_in_model

    from coat_flux.blocks.apply import apply_coat
    from coat_flux.blocks.held import HeldParts
    from coat_flux.blocks.lora import attach_lora
    from coat_flux.blocks.sizes import block_bytes
    from coat_flux.config.check import job_for_plan
    from coat_flux.plan.job import JobFacts
    from coat_flux.plan.predict import block_plan

    folder, model, inputs = folder_of(arch, root)
    facts = JobFacts(job_for_plan(job_of(arch, folder, qtype, checkpointing)))
    plan = block_plan(facts)
    draw_weights(model)
    if qtype:
        sys.path.insert(0, os.environ["AI_TOOLKIT_ROOT"])
        with contextlib.redirect_stdout(io.StringIO()):  # ai-toolkit prints what it makes
            quantize_as_host(model, qtype)
    coat = facts.job.coat
    apply_coat(model.requires_grad_(False).train(), coat)
    held = HeldParts(torch.device("cpu"))
    held.add("transformer", model)
    weights = held.count()["transformer"]
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=facts.targets), model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    attach_lora(model, coat)
    given = in_bf16(inputs)

    def run() -> tuple[Tensor, ...]:
        return tuple(x for x in tree_leaves(model(**given)) if isinstance(x, Tensor))

    for _ in range(2):  # weights are joined and adapters copied, in memory of their own
        run()
    again, saved = bool(plan.recomputed), plan.around_bytes
    for block, settings in zip(facts.blocks, facts.settings, strict=True):
        size = block_bytes(block, facts.tokens, settings)
        saved += size.recomputed if again else size.kept
    sizes = {"weights": facts.transformer_bytes, "weights_counted": weights}
    sizes |= {"saved": saved, "saved_counted": kept_bytes(run)}
    return {"arch": arch, "class": type(model).__name__, "qtype": qtype, **sizes, "assumed": facts.assumed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", metavar="ARCH")
    parser.add_argument("--qtype", action="append")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    for arch, qtype in itertools.product(args.archs or ARCHS, args.qtype or [""]):
        with tempfile.TemporaryDirectory() as folder:
            row = measure(arch, Path(folder) / "model", qtype)
        if not args.table:
            print(json.dumps(row), flush=True)
            continue
        columns = [f"`{arch}`", f"`{row['class']}`", *([f"`{qtype}`"] if qtype else [])]
        for name in ("weights", "saved"):
            off = row[name] / row[f"{name}_counted"] - 1
            columns += [f"{row[name] / 1e6:.2f}", f"{row[f'{name}_counted'] / 1e6:.2f}", f"{off:+.1%}"]
        print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
