from fnmatch import fnmatch

from torch import nn
from version import IS_NEWER

from toolkit.util.ostris_quant import convert_linear_to_ostris, get_ostris_quantizer


def get_qtype(qtype):
    quantizer = get_ostris_quantizer(qtype)
    if quantizer is None:
        raise KeyError(qtype)
    return quantizer


def quantize(model, weights, include=None, exclude=()):
    """Swallows what goes wrong with a layer, as ai-toolkit does."""
    for name, module in list(model.named_modules()):
        if include is not None and not any(fnmatch(name, pattern) for pattern in include):
            continue
        if any(fnmatch(name, pattern) for pattern in exclude):
            continue
        try:
            if isinstance(module, nn.Linear):
                convert_linear_to_ostris(module, weights)
        except Exception as error:
            print(f"Failed to quantize {name}: {error}")


if IS_NEWER:

    def quantize_module(module, qtype, device=None, block_names=(), exclude=None, quantize_kwargs=None):
        """Block by block, with names inside the block, and then the rest."""
        blocks = [block for name in block_names for block in module.get_submodule(name)]
        for part in (*blocks, module):
            quantize(part, get_qtype(qtype), exclude=exclude or (), **(quantize_kwargs or {}))
            if part in blocks:
                part.left_on_gpu = [each for each in part.modules() if type(each) is nn.Linear]
