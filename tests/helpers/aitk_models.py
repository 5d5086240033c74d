"""Small models of ai-toolkit's own classes, one for each `arch`, with inputs: imported in ai-toolkit's environment.

Widths of 256 in four heads of 64, two blocks of each kind, 256 image tokens and 64 text tokens where the class allows
it; weights are drawn by the caller. Classes are imported where they are built: each has its own needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import aitk_models_near_flux as near
import aitk_models_of_diffusers as theirs
import aitk_models_own as own
from aitk_inputs import Made

KLEIN, SDXL = partial(near.flux2, guidance=False), partial(theirs.unet, extra=True)
MODELS: dict[str, Callable[[], Made]] = {
    "flux": near.flux,
    "flex2": near.flux,
    "flux_kontext": near.kontext,
    "flux2": near.flux2,
    "flux2_klein_4b": KLEIN,
    "flux2_klein_9b": KLEIN,
    "chroma": near.chroma,
    "chroma_radiance": near.chroma_radiance,
    "qwen_image": near.qwen_image,
    "qwen_image_edit": partial(near.qwen_image, images=2),
    "qwen_image_edit_plus": partial(near.qwen_image, images=3),
    "zimage": near.zimage,
    "zimage_l2p": near.zimage_l2p,
    "zeta_chroma": near.zeta_chroma,
    "krea2": near.krea2,
    "ideogram4": near.ideogram4,
    "wan21": own.wan,
    "wan21_i2v": partial(own.wan, image=True),
    "wan22_5b": own.wan,
    "wan22_14b": own.wan22_14b,
    "wan22_14b_i2v": own.wan22_14b,
    "minimax_h3": own.minimax_h3,
    "minimax_h3_ref2va": own.minimax_h3,
    "mageflow": own.mageflow,
    "mageflow_edit": own.mageflow,
    "anima": own.anima,
    "omnigen2": own.omnigen2,
    "boogu_image": own.boogu_image,
    "boogu_image_edit": own.boogu_image,
    "ernie_image": own.ernie_image,
    "prx_pixel": own.prx_pixel,
    "f-lite": own.f_lite,
    "lumina2": theirs.lumina2,
    "cogview4": theirs.cogview4,
    "ltx2": theirs.ltx2,
    "ltx2.3": theirs.ltx2,
    "ltx2.5": theirs.ltx2,
    "nucleus_image": theirs.nucleus_image,
    "auraflow": theirs.auraflow,
    "pixart": theirs.pixart,
    "pixart_sigma": theirs.pixart,
    "sd3": theirs.sd3,
    "sdxl": SDXL,
    "ssd": SDXL,
    "vega": SDXL,
    "sd1": theirs.unet,
    "sd2": theirs.unet,
}
