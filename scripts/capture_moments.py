"""Captures AdamW's exact moments from a real training, for `scripts/moment_error.py`.

    python scripts/capture_moments.py [--train full] [--out output/moments] [--steps 1 2 10 100 400 800]

The mini-FLUX that comes with this package (diffusers' own classes) is fine-tuned, all of its transformer or with PEFT
LoRA on every linear of its blocks, B = 0 at the start, on the latents and captions of `datasets_example/clothing`, with
FLUX's flow-matching loss and fp32 torch.optim.AdamW. `--weights random` takes a FLUX transformer of any size with
random weights in its place. At each of the steps exp_avg and exp_avg_sq go to `step_000100.safetensors` and so on;
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn

from coat_flux.mini_flux.folder import make_mini_flux, make_tiny_flux
from coat_flux.mini_flux.models import TINY_TRANSFORMER_CONFIG, initialise
from coat_flux.trainers.standalone.flow_matching import (
    draw_sigmas,
    noisy_latents,
    predict_velocity,
    sample_losses,
    sigma_table,
)

ROOT = Path(__file__).resolve().parents[1]


def build_flux(blocks: int, heads: int, head_dim: int, seed: int = 0) -> nn.Module:
    """Return a FLUX transformer of `blocks` double and `blocks` single blocks with random weights."""
    from diffusers import FluxTransformer2DModel

    rope = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    geometry = {
        "num_layers": blocks,
        "num_single_layers": blocks,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "axes_dims_rope": rope,
    }
    return initialise(FluxTransformer2DModel(**{**TINY_TRANSFORMER_CONFIG, **geometry}), f"moments-{seed}")


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> nn.Module:
    """Freeze the model and give every linear of its blocks a fp32 adapter, B = 0."""
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in names if name.startswith(("transformer_blocks.", "single_transformer_blocks."))]
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), model)
    return model


def build_lora_flux(blocks: int, heads: int, head_dim: int, rank: int, seed: int = 0) -> nn.Module:
    """Return `build_flux` with `add_lora`, ready to train."""
    return add_lora(build_flux(blocks, heads, head_dim, seed), rank, seed).train()


def encode_dataset(folder: Path, model: Path, size: int) -> dict[str, Tensor]:
    """Return latents [N, C, size/8, size/8], prompt_embeds [N, L, D] and pooled [N, P] of a folder of images.

    Args:
        folder: images with captions next to them.
        model: diffusers folder with the VAE and the text encoders.
        size: of the images, in pixels.
    """
    from diffusers import FluxPipeline
    from PIL import Image, ImageOps

    pipeline = FluxPipeline.from_pretrained(model, transformer=None)
    images = sorted(path for path in folder.iterdir() if path.suffix in (".jpg", ".png"))
    captions = [path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in images]
    pixels = []
    for path in images:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        pixels.append(pipeline.image_processor.preprocess(ImageOps.fit(upright, (size, size))))
    with torch.no_grad():
        vae = pipeline.vae
        latents = (
            vae.encode(torch.cat(pixels)).latent_dist.mode() - vae.config.shift_factor
        ) * vae.config.scaling_factor
        prompt_embeds, pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=32)
    return {"latents": latents, "prompt_embeds": prompt_embeds, "pooled": pooled}


def losses(model: nn.Module, data: dict[str, Tensor], batch: int, seed: int) -> Iterator[Tensor]:
    """Yield FLUX's flow-matching loss of one random batch after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(data["latents"]), (batch,), generator=generator)
        latents = data["latents"][chosen]
        _, sigmas = draw_sigmas(sigma_table("sigmoid", tokens=0, generator=generator), batch, generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        x_t = noisy_latents(latents, noise, sigmas)
        embeds, pooled = data["prompt_embeds"][chosen], data["pooled"][chosen]
        prediction = predict_velocity(model, x_t, sigmas, embeds, pooled, dtype=torch.float32)
        yield sample_losses(prediction, latents, noise, None).mean()


def train_and_capture(
    model: nn.Module, data: dict[str, Tensor], steps: list[int], *, lr: float, batch: int, seed: int = 0
) -> Iterator[tuple[int, float, dict[str, Tensor]]]:
    """Train with fp32 AdamW; yield (step, loss, {"<parameter>.exp_avg" | "….exp_avg_sq": fp32}) at each of `steps`."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=lr, betas=(0.9, 0.999), weight_decay=1e-4)
    for step, loss in enumerate(losses(model, data, batch, seed), start=1):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in steps:
            moments = {
                f"{name}.{key}": optimizer.state[param][key].clone()
                for name, param in named.items()
                for key in ("exp_avg", "exp_avg_sq")
            }
            yield step, loss.item(), moments
        if step == max(steps):
            return


def trained_model(args: argparse.Namespace) -> tuple[nn.Module, Path]:
    """Return the transformer as the options ask for it, and the diffusers folder of all other parts."""
    from diffusers import FluxTransformer2DModel

    if args.weights == "mini":
        folder = make_mini_flux(args.models / "coat_mini_flux")
        model = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    else:
        folder = make_tiny_flux(args.models / "tiny-flux")
        model = build_flux(args.blocks, args.heads, args.head_dim, args.seed)
    return (add_lora(model, args.rank, args.seed) if args.train == "lora" else model).train(), folder


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "moments")
    parser.add_argument("--data", type=Path, default=ROOT / "datasets_example" / "clothing")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where the embedded models are made")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 10, 100, 400, 800])
    parser.add_argument("--train", choices=("lora", "full"), default="lora")
    parser.add_argument("--weights", choices=("mini", "random"), default="mini")
    parser.add_argument("--blocks", type=int, default=4, help="of each kind, with random weights")
    parser.add_argument("--heads", type=int, default=4, help="with random weights")
    parser.add_argument("--head-dim", type=int, default=64, help="with random weights")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="image size in pixels")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train and write the captures."""
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    model, folder = trained_model(args)
    data = encode_dataset(args.data, folder, args.size)
    trained = [param for param in model.parameters() if param.requires_grad]
    total = sum(param.numel() for param in trained)
    print(f"{args.train}: {total:,} parameters in {len(trained)} tensors; {len(data['latents'])} images")
    start = time.perf_counter()
    settings = {key: str(value) for key, value in vars(args).items()}
    for step, loss, moments in train_and_capture(model, data, args.steps, lr=args.lr, batch=args.batch, seed=args.seed):
        path = args.out / f"step_{step:06d}.safetensors"
        save_file(moments, path, metadata={"settings": json.dumps(settings), "step": str(step)})
        print(f"step {step}: loss {loss:.4f}, {time.perf_counter() - start:.0f} s -> {path}", flush=True)


if __name__ == "__main__":
    main()
