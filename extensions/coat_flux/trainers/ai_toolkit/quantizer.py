"""The qtype `coat_fp8`: an ai-toolkit weight backend that multiplies in FP8.

LoRA detection, merge guards and low-VRAM loading know `OstrisLinear`, so our linears are such modules. Casts after each
sample would turn FP8 and fp32 buffers into bf16, but not integers. So:

    weight_codes, weight_scale_bits   from `store_weight` of coat_core
    coat_weight_format, ..._granularity   strings, which ai-toolkit saves too
    coat_linear_config                the FP8LinearConfig
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ...base.names import COAT_QTYPE
from . import host
from .contract import require_module
from .host import QUANTIZER_MODULE, AIToolkitError, info, load_core

if TYPE_CHECKING:
    from torch import Tensor, nn

    from coat_core.config import FP8LinearConfig

BLOCKWISE_MODULE = "toolkit.util.quantize"
_stored: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # linears quantized at load and not reported yet


def install_quantizer() -> None:
    """Make `qtype: coat_fp8` our backend; raises AIToolkitError."""
    require_module(QUANTIZER_MODULE)
    original = sys.modules[QUANTIZER_MODULE].get_ostris_quantizer

    def get_ostris_quantizer(qtype: str, *args: Any, **kwargs: Any) -> Any:
        if qtype != COAT_QTYPE:
            return original(qtype, *args, **kwargs)
        load_core()
        return backend_class()(host.config_or_default().linear_config())

    host.wrap_everywhere("get_ostris_quantizer", original, get_ostris_quantizer)
    quantize_module = getattr(sys.modules.get(BLOCKWISE_MODULE), "quantize_module", None)
    if quantize_module is not None:
        host.wrap_everywhere("quantize_module", quantize_module, _within_blocks(quantize_module))


def _within_blocks(original: Any) -> Any:
    """ai-toolkit's `quantize_module`, from 0.13 on, for our patterns in `quantize_kwargs.include` (`choose_at_load`).

    Inside blocks, which it quantizes one by one, names are relative: there no pattern of ours would match. And it
    applies the patterns to text encoders.
    """
    signature = inspect.signature(original)

    def quantize_module(*args: Any, **kwargs: Any) -> Any:
        if host.config is None:
            return original(*args, **kwargs)
        from ...blocks.models import FAMILIES, matches

        call = signature.bind(*args, **kwargs)
        values = call.arguments
        options = dict(values.get("quantize_kwargs") or {})
        patterns = tuple(options.get("include") or ())
        if patterns in {family.convert for family in FAMILIES.values()}:
            del options["include"]
            values["quantize_kwargs"] = options
            linears = [name for name, module in values["module"].named_modules() if hasattr(module, "in_features")]
            outside = [name for name in linears if not matches(name, patterns)]
            if values["qtype"] == COAT_QTYPE and len(outside) < len(linears):  # not a text encoder
                values["exclude"] = [*(values.get("exclude") or ()), *outside]
        return original(*call.args, **call.kwargs)

    return quantize_module


@functools.cache
def backend_class() -> type:
    """The class of our backend; one instance serves many modules."""
    from toolkit.util.ostris_quant import OstrisLinear, OstrisQuantizer
    from torch import nn

    from coat_core.linear.function import read_weight, store_weight
    from coat_core.linear.module import run_stored_linear
    from coat_core.ops.scaled_mm import ALIGNMENT

    from ...blocks.cast_loss import note_weight
    from ...blocks.lora import toolkit_adapters
    from ...blocks.streaming import park

    class CoatFp8Quantizer(OstrisQuantizer):
        qtype = COAT_QTYPE
        wants_fp32_weight = False

        def __init__(self, config: FP8LinearConfig):
            self.config = config

        def can_quantize(self, module: nn.Linear) -> bool:
            return module.in_features % ALIGNMENT == 0 and module.out_features % ALIGNMENT == 0

        def quantize_(self, module: nn.Linear, weight: Tensor) -> None:
            before = getattr(module, "ostris_quantizer", None)  # of a file with codes
            if before is not None:
                module.coat_made_from = before.qtype
            module.coat_weight_format = self.config.weight_format
            module.coat_weight_granularity = self.config.weight_granularity
            self.requantize_(module, weight)
            _stored.add(module)
            for adapter in toolkit_adapters(module):  # an assistant's, merged before, has the forward of then
                if getattr(adapter.org_forward, "__func__", None) is nn.Linear.forward:
                    adapter.org_forward = OstrisLinear.forward.__get__(module)

        def dequantize(self, module: nn.Linear) -> Tensor:
            return read_weight(module, self._config_of(module))

        def requantize_(self, module: nn.Linear, weight: Tensor) -> None:
            config = self._config_of(module)
            coat = host.config
            # OstrisLinear's state_dict holds "weight" only, so loading must not expect the buffers
            store_weight(module, weight, config, persistent=False)
            note_weight(module, weight, config)
            if coat is not None and coat.memory.stream_blocks != 0:
                park(module)  # ai-toolkit moves the whole model to the GPU before blocks are known

        def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
            return run_stored_linear(module, x, self._config_of(module))

        def _config_of(self, module: nn.Linear) -> FP8LinearConfig:
            if not hasattr(module, "coat_linear_config"):
                # load_quantized_layers restores buffers and plain attributes only
                module.coat_linear_config = dataclasses.replace(
                    self.config,
                    weight_format=module.coat_weight_format,
                    weight_granularity=module.coat_weight_granularity,
                )
            return module.coat_linear_config

    return CoatFp8Quantizer


def report_stored_linears() -> None:
    """Log linears quantized since the last call, but for our jobs, which have a table."""
    linears = list(_stored)
    _stored.clear()
    if not linears or host.config is not None:
        return
    from coat_core.linear.function import fp8_gemm_obstacle

    from ...blocks.report import describe_linear

    config = linears[0].coat_linear_config
    obstacle = fp8_gemm_obstacle(linears[0].weight_codes.device, config)
    products = "" if obstacle is None else f"; dequantized weights are multiplied, since {obstacle}"
    formats = describe_linear(config, True, False)
    info(f"qtype {COAT_QTYPE}: {len(linears)} linears hold FP8, {formats}{products}")


def plain_linears(model: nn.Module) -> list[str]:
    """Names of the linears that are not converted yet."""
    from torch import nn

    from coat_core.linear.module import obstacle_to_conversion

    from ...blocks.models import family_of, matches

    patterns = family_of(model).convert
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and matches(name, patterns) and obstacle_to_conversion(module) is None
    ]


def convert(model: nn.Module, names: list[str], config: FP8LinearConfig) -> None:
    """Convert the named linears in place."""
    from toolkit.util.ostris_quant import convert_linear_to_ostris

    quantizer = backend_class()(config)
    for name in names:
        if not convert_linear_to_ostris(model.get_submodule(name), quantizer):
            raise AIToolkitError(f"convert_linear_to_ostris did not convert {name}")


def converted_linears(model: nn.Module) -> list[nn.Module]:
    """The linears in our backend."""
    backend = backend_class()
    return [module for module in model.modules() if isinstance(getattr(module, "ostris_quantizer", None), backend)]


def choose_at_load(process: Any) -> None:
    """Let loading convert the blocks only."""
    from ...blocks.models import ARCHS

    model = process.model_config
    family = ARCHS.get(model.arch)
    if model.quantize and model.qtype == COAT_QTYPE and family is not None:
        model.quantize_kwargs.setdefault("include", list(family.convert))


def convert_model(process: Any, encoders: list[Any], trained: Collection[str] = ()) -> None:
    """Convert what loading did not; text encoders multiply in the input's precision, for their outliers."""
    from ...blocks.streaming import unpark

    model, config = process.sd.unet, process.model_config
    at_load = len(converted_linears(model))
    if config.quantize and config.qtype == COAT_QTYPE and not at_load:
        raise AIToolkitError(f"loading with qtype {COAT_QTYPE} converted no linear; see 'Failed to quantize' above")
    names = [name for name in plain_linears(model) if name not in trained]
    convert(model, names, process.coat.linear_config())
    in_encoders = [module for encoder in encoders for module in converted_linears(encoder)]
    for module in in_encoders:
        if unpark(module):
            module.to(module.weight_scale_bits.device)
        module.coat_linear_config = dataclasses.replace(module.coat_linear_config, use_fp8_gemm=False)
    info(f"FP8 weights: {at_load} linears at load, {len(names)} after it; {len(in_encoders)} in text encoders")
    sources = {qtype for module in model.modules() if (qtype := getattr(module, "coat_made_from", None))}
    if sources:
        info(f"note: the file of the model has {', '.join(sorted(sources))}: FP8 codes are made of that, not of bf16")


def convert_linears(model: nn.Module, qtype: str) -> None:
    """Quantize every linear with ai-toolkit's qtype, outside of it."""
    from torch import nn

    from ...config.ai_toolkit_keys import ROOT_VARIABLE

    root = os.environ.get(ROOT_VARIABLE)
    if not root:
        raise ImportError(f"{qtype} is ai-toolkit's own code: set {ROOT_VARIABLE} to its folder")
    if root not in sys.path:
        sys.path.append(root)
    from toolkit.util.ostris_quant import convert_linear_to_ostris, get_ostris_quantizer

    quantizer = get_ostris_quantizer(qtype)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            convert_linear_to_ostris(module, quantizer)
