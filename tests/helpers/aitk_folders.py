"""Tiny models with random weights in the layouts that ai-toolkit's own loaders read: `python aitk_folders.py FOLDER`.

Run in ai-toolkit's environment with AI_TOOLKIT_ROOT; FOLDER is the working directory of the jobs to come. Its loaders
run unchanged except for the sizes that its code holds, which an extension replaces at the start of each job
(`substitute`). `Qwen` holds what is named on the hub, and is found first.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from aitk_models import KREA2, TEXT_WIDTH, Z_IMAGE, draw_weights, flux2_params
from safetensors.torch import save_file
from torch import nn

EXTENSION = """import sys

sys.path.append({folder!r})
from aitk_folders import substitute

substitute()
AI_TOOLKIT_EXTENSIONS = []
"""
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def klein_params() -> Any:
    """Three layers of its text encoder are side by side."""
    return flux2_params(guidance=False, in_channels=128, context_in_dim=3 * TEXT_WIDTH)


def flux2_vae_params() -> Any:
    """With its own 32 latent channels, 128 in 2×2 patches."""
    from extensions_built_in.diffusion_models.flux2.src.autoencoder import AutoEncoderParams

    return AutoEncoderParams(ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1)


def substitute() -> None:
    from extensions_built_in.diffusion_models.flux2 import flux2_klein_model, flux2_model
    from extensions_built_in.diffusion_models.krea2 import krea2

    flux2_klein_model.Flux2Klein4BModel.get_flux2_params = lambda self: klein_params()
    flux2_model.AutoEncoderParams = flux2_vae_params
    krea2.KREA2_MMDIT_CONFIG.update(KREA2)


def checkpoint(model: nn.Module, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in draw_weights(model).state_dict().items()}, path)


def qwen3(folder: Path) -> None:
    """A text encoder with the layers that FLUX.2 reads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": TEXT_WIDTH, "intermediate_size": 2 * TEXT_WIDTH, "head_dim": 16}
    heads = {"num_hidden_layers": 28, "num_attention_heads": 4, "num_key_value_heads": 2}
    draw_weights(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=2048))).save_pretrained(folder)
    tokenizer(folder)


def tokenizer(folder: Path) -> None:
    """Qwen's, with a token for each byte and no merges."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=1024)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHAT
    made.save_pretrained(folder)


def kontext(folder: Path, flux: Path) -> None:
    folder.mkdir()
    for path in flux.iterdir():
        if path.is_dir():
            (folder / path.name).symlink_to(path, target_is_directory=True)
    index = (flux / "model_index.json").read_text(encoding="utf-8").replace('"FluxPipeline"', '"FluxKontextPipeline"')
    (folder / "model_index.json").write_text(index, encoding="utf-8")


def zimage(folder: Path, flux: Path) -> None:
    from diffusers import ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(in_channels=16, **{**Z_IMAGE, "axes_lens": [1536, 128, 128]})
    draw_weights(transformer).save_pretrained(folder / "transformer")
    qwen3(folder / "text_encoder")
    (folder / "tokenizer").symlink_to(folder / "text_encoder", target_is_directory=True)
    (folder / "vae").symlink_to(flux / "vae", target_is_directory=True)


def qwen3_vl(folder: Path) -> None:
    """A text encoder with the layers that Krea 2 reads."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 36}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {"vocab_size": 512, "hidden_size": KREA2["txtdim"], "intermediate_size": 256, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    vision |= {"out_hidden_size": KREA2["txtdim"], "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(text_config=text | heads, vision_config=vision)
    draw_weights(Qwen3VLForConditionalGeneration(config)).save_pretrained(folder)
    tokenizer(folder)


def make(root: Path) -> None:
    from diffusers import AutoencoderKLQwenImage
    from extensions_built_in.diffusion_models.flux2.src.autoencoder import AutoEncoder
    from extensions_built_in.diffusion_models.flux2.src.model import Flux2
    from extensions_built_in.diffusion_models.krea2.src.mmdit import SingleMMDiTConfig, SingleStreamDiT

    from tests.helpers.tiny_flux import make_tiny_flux

    torch.manual_seed(0)
    models = root / "models"
    flux = make_tiny_flux(models / "flux")
    kontext(models / "flux_kontext", flux)
    checkpoint(Flux2(klein_params()), models / "flux2_klein_4b" / "flux-2-klein-base-4b.safetensors")
    checkpoint(AutoEncoder(flux2_vae_params()), models / "flux2_klein_4b" / "ae.safetensors")
    qwen3(root / "Qwen" / "Qwen3-4B")
    zimage(models / "zimage", flux)
    krea2 = SingleStreamDiT(SingleMMDiTConfig(**KREA2, patch=2, channels=16))
    checkpoint(krea2, models / "krea2" / "raw.safetensors")
    qwen3_vl(root / "Qwen" / "Qwen3-VL-4B-Instruct")
    vae = AutoencoderKLQwenImage(base_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    draw_weights(vae).save_pretrained(root / "Qwen" / "Qwen-Image" / "vae")
    extension = root / "extensions" / "tiny_geometries" / "__init__.py"
    extension.parent.mkdir(parents=True, exist_ok=True)
    extension.write_text(EXTENSION.format(folder=str(Path(__file__).resolve().parent)), encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [os.environ["AI_TOOLKIT_ROOT"], str(Path(__file__).resolve().parents[2])]
    make(Path(sys.argv[1]).resolve())
