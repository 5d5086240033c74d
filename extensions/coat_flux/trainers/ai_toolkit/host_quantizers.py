"""ai-toolkit's own quantized linears outside of its runs: what COAT is compared with."""

from __future__ import annotations

import os
import sys

from torch import nn

ROOT_VARIABLE = "AI_TOOLKIT_ROOT"


def convert_linears(model: nn.Module, qtype: str) -> None:
    """Quantize every linear that ai-toolkit would, in place.

    Args:
        model: a transformer without adapters.
        qtype: one of ai-toolkit's own kinds, such as "convrot8".

    Raises:
        ImportError: ai-toolkit, or a package of its, is not here; the message says what to set.
    """
    root = os.environ.get(ROOT_VARIABLE)
    if not root:
        raise ImportError(f"{qtype} is ai-toolkit's own code: set {ROOT_VARIABLE} to its folder")
    if root not in sys.path:
        sys.path.append(root)
    from toolkit.util.ostris_quant import convert_linear_to_ostris, get_ostris_quantizer

    quantizer = get_ostris_quantizer(qtype)
    if quantizer is None:
        raise ImportError(f"{root}: this ai-toolkit does not know the qtype {qtype}")
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            convert_linear_to_ostris(module, quantizer)
