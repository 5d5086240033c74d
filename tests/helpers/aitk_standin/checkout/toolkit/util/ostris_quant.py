"""The pluggable weight backend: linears whose weight is held by a quantizer, converted by swapping their class."""

import torch
from torch import nn


class OstrisQuantizer:
    qtype = None
    wants_fp32_weight = True

    def can_quantize(self, module):
        return True

    def quantize_(self, module, weight):
        raise NotImplementedError

    def dequantize(self, module):
        raise NotImplementedError

    def requantize_(self, module, weight):
        raise NotImplementedError

    def forward(self, module, x):
        return nn.functional.linear(x, self.dequantize(module).to(x.dtype), module.bias)


class OstrisLinear(nn.Linear):
    @property
    def weight(self):
        return self.ostris_quantizer.dequantize(self).to(self.ostris_orig_dtype)

    def forward(self, x):
        return self.ostris_quantizer.forward(self, x)


class OwnQuantizer(OstrisQuantizer):
    """The stand-in's own backend, to see that other qtypes are left alone."""

    qtype = "half"


def get_ostris_quantizer(qtype):
    return OwnQuantizer() if qtype == "half" else None


@torch.no_grad()
def convert_linear_to_ostris(module, quantizer):
    if isinstance(module, OstrisLinear):
        return True
    if not quantizer.can_quantize(module):
        return False
    weight = module._parameters["weight"]
    quantizer.quantize_(module, weight.data.float() if quantizer.wants_fp32_weight else weight.data)
    module.ostris_quantizer = quantizer
    module.ostris_orig_dtype = weight.dtype
    del module._parameters["weight"]
    module.__class__ = OstrisLinear
    return True
