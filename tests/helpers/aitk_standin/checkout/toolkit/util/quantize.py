from fnmatch import fnmatch

from torch import nn

from toolkit.util.ostris_quant import convert_linear_to_ostris, get_ostris_quantizer


def get_qtype(qtype):
    quantizer = get_ostris_quantizer(qtype)
    if quantizer is None:
        raise KeyError(qtype)
    return quantizer


def quantize(model, weights, include=None):
    """Swallows what goes wrong with a layer, as ai-toolkit does."""
    for name, module in list(model.named_modules()):
        if include is not None and not any(fnmatch(name, pattern) for pattern in include):
            continue
        try:
            if isinstance(module, nn.Linear):
                convert_linear_to_ostris(module, weights)
        except Exception as error:
            print(f"Failed to quantize {name}: {error}")
