"""The qtype `coat_fp8`: ai-toolkit's pluggable weight backend, holding FP8 codes and multiplying in FP8.

`OstrisLinear` is what ai-toolkit's LoRA detection, merge guards, low-VRAM loading and state_dict already understand, so
our linears are OstrisLinear modules whose backend is `CoatFp8Quantizer`. ai-toolkit casts models with `.to(dtype)`
after each sample, which would turn FP8 and fp32 buffers into bf16; integer buffers are left alone. So:

    weight_codes, weight_scale_bits   as `coat_core.linear.weight.store_weight` makes them
    coat_weight_format, coat_weight_granularity   strings, so that ai-toolkit's own save of quantized layers keeps them
    coat_linear_config                the FP8LinearConfig the layer multiplies with

x ≈ codes · scale, as everywhere here.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from ...base.names import COAT_QTYPE
from .common import AIToolkitError, active_config, info, is_ours, load_core, rebind

if TYPE_CHECKING:
    from torch import Tensor, nn

    from coat_core.config import FP8LinearConfig

__all__ = [
    "choose_at_load",
    "convert",
    "convert_model",
    "converted_linears",
    "damaged_linears",
    "install_quantizer",
    "make_quantizer",
    "say_what_is_stored",
    "store_only",
]

BACKEND_METHODS = ("can_quantize", "quantize_", "dequantize", "requantize_", "forward")
_MARK = "_coat_flux_original"
_stored: list[tuple[weakref.ref[nn.Module], FP8LinearConfig]] = []  # linears quantized at load and not reported yet


def install_quantizer() -> list[str]:
    """Make `qtype: coat_fp8` resolve to our backend, wherever `get_ostris_quantizer` is bound.

    Returns:
        Names of the modules changed by this call; empty when it had been done before.

    Raises:
        AIToolkitError: ai-toolkit has no pluggable weight backend, or another one.
    """
    try:
        from toolkit.util.ostris_quant import OstrisQuantizer, get_ostris_quantizer
    except ImportError as error:
        raise AIToolkitError(f"qtype {COAT_QTYPE} needs toolkit.util.ostris_quant ({error})") from error
    absent = [name for name in BACKEND_METHODS if not hasattr(OstrisQuantizer, name)]
    if absent:
        raise AIToolkitError(f"toolkit.util.ostris_quant.OstrisQuantizer has no {', '.join(absent)}")
    original = getattr(get_ostris_quantizer, _MARK, None)
    if original is not None:
        return rebind("get_ostris_quantizer", original, get_ostris_quantizer)
    return rebind("get_ostris_quantizer", get_ostris_quantizer, _wrap(get_ostris_quantizer))


def _wrap(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_ostris_quantizer(qtype: str, *args: Any, **kwargs: Any) -> Any:
        if qtype != COAT_QTYPE:
            return original(qtype, *args, **kwargs)
        load_core()
        return make_quantizer(active_config().linear_config())

    setattr(get_ostris_quantizer, _MARK, original)
    return get_ostris_quantizer


def make_quantizer(config: FP8LinearConfig) -> Any:
    """Return a backend that converts linears to FP8 codes as `config` says."""
    quantizer = _quantizer_class()(config)
    quantizer.qtype = COAT_QTYPE
    return quantizer


@functools.cache
def _quantizer_class() -> type:
    from toolkit.util.ostris_quant import OstrisQuantizer

    return type("CoatFp8Quantizer", (_Backend, OstrisQuantizer), {"__doc__": _Backend.__doc__})


class _Backend:
    """FP8 weights with FP8 GEMMs; one instance serves many modules and holds no tensor."""

    wants_fp32_weight = False

    def __init__(self, config: FP8LinearConfig):
        self.config = config

    def can_quantize(self, module: nn.Linear) -> bool:
        from coat_core.ops.scaled_mm import ALIGNMENT

        return module.in_features % ALIGNMENT == 0 and module.out_features % ALIGNMENT == 0

    def quantize_(self, module: nn.Linear, weight: Tensor) -> None:
        module.coat_weight_format = self.config.weight_format
        module.coat_weight_granularity = self.config.weight_granularity
        module.coat_linear_config = self.config
        _store(module, weight)
        _stored.append((weakref.ref(module), self.config))

    def dequantize(self, module: nn.Linear) -> Tensor:
        from coat_core.linear.weight import read_weight

        return read_weight(module, self._config_of(module))

    def requantize_(self, module: nn.Linear, fp_weight: Tensor) -> None:
        self._config_of(module)
        _store(module, fp_weight)

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        from coat_core.linear.module import run_stored_linear

        return run_stored_linear(module, x, self._config_of(module))

    def _config_of(self, module: nn.Linear) -> FP8LinearConfig:
        if not hasattr(module, "coat_linear_config"):
            # ai-toolkit's load_quantized_layers brings back buffers and plain attributes, not our config object
            module.coat_linear_config = dataclasses.replace(
                self.config,
                weight_format=module.coat_weight_format,
                weight_granularity=module.coat_weight_granularity,
            )
        return module.coat_linear_config


def say_what_is_stored() -> None:
    """Log how the linears quantized since the last call are stored and multiply; a job of ours has a table."""
    found = [(module, config) for reference, config in _stored if (module := reference()) is not None]
    _stored.clear()
    if not found or is_ours():
        return
    from coat_core.linear.function import fp8_gemm_obstacle

    from ...blocks.report import describe_linear

    module, config = found[0]
    obstacle = fp8_gemm_obstacle(module.weight_codes.device, config)
    products = "" if obstacle is None else f"; dequantized weights are multiplied, since {obstacle}"
    info(f"[coat] qtype {COAT_QTYPE}: {len(found)} linears hold FP8, {describe_linear(config, True, False)}{products}")


def _store(module: nn.Linear, weight: Tensor) -> None:
    from coat_core.linear.weight import store_weight

    from ...blocks.cast_loss import note_weight
    from ...blocks.streaming import park

    # OstrisLinear's state_dict holds "weight" only, so the buffers must not be expected when one is loaded
    store_weight(module, weight, module.coat_linear_config, persistent=False)
    note_weight(module, weight, module.coat_linear_config)
    if is_ours() and active_config().memory.stream_blocks != 0:
        park(module)  # ai-toolkit moves the whole model to the GPU before blocks are known


def converted_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every linear of `model` that our backend holds."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "ostris_quantizer", None), "qtype", None) == COAT_QTYPE:
            yield name, module


def plain_linears(model: nn.Module) -> list[str]:
    """Return the names of the linears that COAT converts and that are still plain nn.Linear."""
    from torch import nn

    from coat_core.linear.module import obstacle_to_conversion

    from ...blocks.lookup import family_of, matches

    patterns = family_of(model).convert
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and matches(name, patterns) and obstacle_to_conversion(module) is None
    ]


def convert(model: nn.Module, names: list[str], config: FP8LinearConfig) -> None:
    """Convert the named linears in place, as loading with `qtype: coat_fp8` would have.

    Raises:
        AIToolkitError: ai-toolkit refused one of them.
    """
    from toolkit.util.ostris_quant import convert_linear_to_ostris

    quantizer = make_quantizer(config)
    for name in names:
        if not convert_linear_to_ostris(model.get_submodule(name), quantizer):
            raise AIToolkitError(f"convert_linear_to_ostris did not convert {name}")


def store_only(model: nn.Module) -> int:
    """Let the converted linears of `model` keep FP8 weights but multiply in the input's precision.

    For text encoders: they run once per caption, without gradients, and their outliers suffer from per-tensor inputs.

    Returns:
        How many linears were set.
    """
    from ...blocks.streaming import unpark

    count = 0
    for _, module in converted_linears(model):
        if unpark(module):
            module.to(module.weight_scale_bits.device)
        module.coat_linear_config = dataclasses.replace(module.coat_linear_config, use_fp8_gemm=False)
        count += 1
    return count


def damaged_linears(model: nn.Module) -> list[str]:
    """Return the names of converted linears whose codes or scales lost their dtype (a cast reached them)."""
    from coat_core.linear.weight import BUFFERS

    return [
        name
        for name, module in converted_linears(model)
        if any(module._buffers[held].dtype.is_floating_point for held in BUFFERS if held in module._buffers)
    ]


def choose_at_load(process: Any) -> None:
    """Let ai-toolkit's quantization at load convert what COAT converts: the blocks, not what is around them."""
    from ...blocks.models import ARCHS

    known = ARCHS.get(process.model_config.arch)
    if _loads_fp8(process) and known is not None:
        process.model_config.quantize_kwargs.setdefault("include", list(known.convert))


def _loads_fp8(process: Any) -> bool:
    return bool(process.model_config.quantize) and process.model_config.qtype == COAT_QTYPE


def convert_model(process: Any, encoders: list[Any], trained: Collection[str] = ()) -> None:
    """Convert and count what loading did not: after "Failed to quantize" ai-toolkit's quantize() continues.

    Args:
        process: of our type, its model loaded.
        encoders: its text encoders.
        trained: full names of linears that stay as they are.

    Raises:
        AIToolkitError: loading was to convert linears and has converted none.
    """
    model = process.sd.unet
    at_load = sum(1 for _ in converted_linears(model))
    if _loads_fp8(process) and not at_load:
        raise AIToolkitError(
            f"loading with qtype {COAT_QTYPE} converted no linear; see the lines 'Failed to quantize' above"
        )
    names = [name for name in plain_linears(model) if name not in trained]
    convert(model, names, process.coat.linear_config())
    stored = sum(map(store_only, encoders))
    info(f"[coat] FP8 weights: {at_load} linears at load, {len(names)} after it; {stored} in text encoders")
