"""Every `model.arch` of ai-toolkit: the class of its transformer, or why COAT does not train it.

The single place of that fact: `check` and the process refuse by it before anything is loaded, `blocks.architectures`
has what is known of each class. An arch that is not here is of another ai-toolkit, or of a user's extension: its blocks
are treated cautiously, and the start table says after the first step what happened to them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .findings import closest

MUSIC = "it makes music, and COAT was tried on images and video only"
EXPERTS = "its experts get tokens by their values, so that a block recomputed from FP8 would route them differently"
OTHER_ATTENTION = "it swaps its attention while a layer is called, so that a recomputed layer would be another one"

TRANSFORMERS = {
    # FLUX.1 and what kept its class
    "flux": "FluxTransformer2DModel",
    "flex2": "FluxTransformer2DModel",
    "flux_kontext": "FluxTransformer2DModel",
    # diffusers' classes, or built like them
    "boogu_image": "BooguImageTransformer2DModel",
    "boogu_image_edit": "BooguImageTransformer2DModel",
    "cogview4": "CogView4Transformer2DModel",
    "ernie_image": "ErnieImageTransformer2DModel",
    "f-lite": "DiT",
    "ltx2": "LTX2VideoTransformer3DModel",
    "ltx2.3": "LTX2VideoTransformer3DModel",
    "ltx2.5": "LTX2VideoTransformer3DModel",
    "lumina2": "Lumina2Transformer2DModel",
    "nucleus_image": "NucleusMoEImageTransformer2DModel",
    "omnigen2": "OmniGen2Transformer2DModel",
    "prx_pixel": "PRXTransformer2DModel",
    "qwen_image": "QwenImageTransformer2DModel",
    "qwen_image_edit": "QwenImageTransformer2DModel",
    "qwen_image_edit_plus": "QwenImageTransformer2DModel",
    "sd3": "SD3Transformer2DModel",
    "wan21": "WanTransformer3DModel",
    "wan21_i2v": "WanTransformer3DModel",
    "wan22_5b": "WanTransformer3DModel",
    "zimage": "ZImageTransformer2DModel",
    "zimage_l2p": "ZImageTransformer2DModel",
    # ai-toolkit's own classes
    "anima": "AnimaTrainableModel",
    "chroma": "Chroma",
    "chroma_radiance": "Chroma",
    "flux2": "Flux2",
    "flux2_klein_4b": "Flux2",
    "flux2_klein_9b": "Flux2",
    "ideogram4": "Ideogram4Transformer2DModel",
    "krea2": "SingleStreamDiT",
    "mageflow": "MageFlow",
    "mageflow_edit": "MageFlow",
    "minimax_h3": "MiniMaxH3Transformer",
    "minimax_h3_ref2va": "MiniMaxH3Transformer",
    "wan22_14b": "DualWanTransformer3DModel",
    "wan22_14b_i2v": "DualWanTransformer3DModel",
    "zeta_chroma": "ZImageDCT",
    # older ones of ai-toolkit's own loader
    "auraflow": "AuraFlowTransformer2DModel",
    "pixart": "PixArtTransformer2DModel",
    "pixart_sigma": "PixArtTransformer2DModel",
    "sd1": "UNet2DConditionModel",
    "sd2": "UNet2DConditionModel",
    "sdxl": "UNet2DConditionModel",
    "ssd": "UNet2DConditionModel",
    "vega": "UNet2DConditionModel",
}
REFUSED = {
    "ace_step_15": MUSIC,
    "ace_step_15_xl": MUSIC,
    "hidream": EXPERTS,
    "hidream_e1": EXPERTS,
    "hidream_o1": OTHER_ATTENTION,
}
PLACES = ("extensions", "extensions_built_in", "toolkit/models")  # where ai-toolkit looks for classes with an `arch`
_ARCH = re.compile(r"^[ \t]+arch\b[^=\n]*=\s*([\"'][^\"'\n]+[\"'])", re.MULTILINE)


def archs_of(root: Path) -> Iterator[str]:
    """Yield the `arch` of every model class in an ai-toolkit checkout, as its source has them; nothing is imported."""
    folders = [each for place in PLACES if (root / place).is_dir() for each in sorted((root / place).iterdir())]
    for folder in folders:  # a user's extension may be a link
        for file in [folder] if folder.suffix == ".py" else sorted(folder.rglob("*.py")):
            for text in _ARCH.findall(file.read_text(encoding="utf-8", errors="replace")):
                yield ast.literal_eval(text)


def refusal(arch: str, host: frozenset[str]) -> tuple[str, bool]:
    """Why COAT does not train an arch, as `<rule>; <remedy>`, and whether that is only a warning; empty where it does.

    Args:
        arch: without a tag.
        host: those of the ai-toolkit at hand; empty where only the list here is known.
    """
    if arch in TRANSFORMERS:
        return "", False
    if arch in REFUSED:
        return f"{REFUSED[arch]}; write coat: {{enabled: false}}, or train one of {_families()}", False
    if arch in host or not host:
        text = (
            "not known here: its blocks are treated cautiously; look at the table after the first step, which says how"
        )
        return text, True
    near = closest(arch, {*host, *TRANSFORMERS})
    remedy = f"did you mean '{near}'?" if near else f"write one of {_families()}"
    return f"not an arch of this ai-toolkit, which would load Stable Diffusion 1; {remedy}", False


def _families() -> str:
    """What COAT trains, without the variants of a name: qwen_image_edit is one of qwen_image."""
    known = sorted(TRANSFORMERS)
    return ", ".join(name for name in known if not any(name.startswith((f"{one}_", f"{one}.")) for one in known))
