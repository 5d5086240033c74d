"""The models COAT knows, one file per family.

Of an unknown class the outermost block lists are converted and take the generic flow.

To add a model: a file like `zimage.py`, or without a reader a row in `others.py`; an entry in `FAMILIES`; its
small model in the tests; a row in docs/models.md.
"""

from __future__ import annotations

from .chroma import CHROMA, CHROMA_OF_TOOLKIT
from .family import BlockList, Family
from .flux1 import FLUX
from .flux2 import FLUX2, FLUX2_OF_TOOLKIT
from .others import GENERIC, REFUSED, REFUSED_PIPELINES
from .qwen_image import QWEN_IMAGE
from .sd3 import SD3
from .zimage import Z_IMAGE

__all__ = ["ARCHS", "FAMILIES", "FLUX", "FLUX2", "PIPELINES", "REFUSED", "BlockList", "Family"]

_ALL = (FLUX, FLUX2, FLUX2_OF_TOOLKIT, CHROMA, CHROMA_OF_TOOLKIT, QWEN_IMAGE, Z_IMAGE, SD3, *GENERIC)
# class of the transformer → what is known of it
FAMILIES: dict[str, Family] = {family.transformer: family for family in _ALL}
# `model.arch` of ai-toolkit → its family; others are refused, or of another ai-toolkit or a user's extension
ARCHS: dict[str, Family] = {arch: family for family in _ALL for arch in family.archs}
# a pipeline's class in model_index.json → the archs that it is trained as
PIPELINES: dict[str, tuple[str, ...]] = {
    **{name: archs for family in _ALL for name, archs in family.pipelines.items()},
    **REFUSED_PIPELINES,
}
