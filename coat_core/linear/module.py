"""nn.Linear with an FP8 weight, frozen (codes only) or trainable; whole models converted and back, in place."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from coat_core.config import FP8LinearConfig
from coat_core.formats import FORMATS
from coat_core.linear.function import (
    CODES,
    SCALE,
    TRANSPOSED,
    StoredWeight,
    TrainedCodes,
    drop_weight,
    fp8_linear,
    fp8_trainable_linear,
    input_storage,
    keep_transposed,
    load_weight,
    read_weight,
    store_weight,
    weight_buffers,
)
from coat_core.ops.quantize import quantize_once
from coat_core.ops.scaled_mm import ALIGNMENT

logger = logging.getLogger(__name__)

ADAPTER_PARTS = {"lora_A", "lora_B", "lora_down", "lora_up"}  # module names of PEFT and of ai-toolkit
# no attribute: copies would keep it
_WRITERS: weakref.WeakKeyDictionary[nn.Module, Callable[[Any, Tensor], None]] = weakref.WeakKeyDictionary()


def run_stored_linear(module: nn.Module, x: Tensor, config: FP8LinearConfig) -> Tensor:
    """Forward pass of a module whose weight is in `store_weight`'s buffers; x [..., K] to [..., N]."""
    hand_over_input(module, x, config)
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return fp8_linear(x, functools.partial(load_weight, module, config), bias, config)


def hand_over_input(module: nn.Module, x: Tensor, config: FP8LinearConfig) -> None:
    """Give the adapter a weak reference to x, which carries its FP8 copy, if `module.hands_input_to_adapter`."""
    if not getattr(module, "hands_input_to_adapter", False):
        return
    saves_for_backward = torch.is_grad_enabled() and x.numel() > 0
    module.adapter_input = weakref.ref(x) if saves_for_backward else None  # type: ignore[assignment]
    if saves_for_backward:
        quantize_once(x, input_storage(config))


_LOST = (
    "weight of an FP8Linear: cannot be written; to merge an adapter, do it inside "
    "`with coat_core.allow_merging(model):`, or call coat_core.restore_linear(model) first"
)
_CHANGING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_OF_TENSOR: Any = vars(torch._C.TensorBase)
_SHAPES = {_OF_TENSOR[name].__get__ for name in ("shape", "dtype", "ndim")} | {Tensor.size, Tensor.dim, Tensor.numel}


class ReadOnlyWeight(Tensor):
    """`FP8Linear.weight`: a meta tensor, dequantized when its values are read; written only in `allow_merging`."""

    owner: FP8Linear

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name in _CHANGING or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        kwargs = kwargs or {}
        changed = kwargs.get("out", next(iter((*args, *kwargs.values())), None))
        if isinstance(changed, ReadOnlyWeight) and (in_place or "out" in kwargs):
            raise RuntimeError(_LOST)
        if func == _OF_TENSOR["data"].__set__ and isinstance(changed, ReadOnlyWeight):
            changed.owner.weight = args[1]
            return None
        if func == _OF_TENSOR["device"].__get__:
            return args[0].owner._buffers[SCALE].device
        if func not in _SHAPES:
            args, kwargs = tree_map_only(
                ReadOnlyWeight,
                lambda weight: read_weight(weight.owner, weight.owner.config, weight.dtype),
                (args, kwargs),
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class FP8Linear(nn.Linear):
    """nn.Linear with a frozen FP8 weight; no high precision copy stays in memory.

    Buffers: weight_codes uint8 [N, K], the bits of the FP8 codes; weight_scale_bits int32 [] or [N, 1], those of the
    fp32 scale. `weight` is dequantized on every access, in the dtype of the layer.
    """

    config: FP8LinearConfig
    weight_dtype: torch.dtype

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **kwargs: Any) -> None:
        config = kwargs.pop("config", None) or FP8LinearConfig()
        super().__init__(in_features, out_features, bias, **kwargs)
        FP8Linear.from_linear(self, config)

    @staticmethod
    @torch.no_grad()
    def from_linear(
        linear: nn.Linear, config: FP8LinearConfig | None = None, stored: StoredWeight | None = None
    ) -> FP8Linear:
        """Convert in place, freezing the bias; ValueError unless floating with K and N multiples of 16.

        `stored`: codes and scale of its weight, of the configuration's format and granularity, used unchanged.
        """
        config = config or FP8LinearConfig()
        reason = obstacle_to_conversion(linear)
        if reason is not None:
            raise ValueError(f"{type(linear).__name__}({linear.in_features}, {linear.out_features}): {reason}")
        weight = linear._parameters.pop("weight")
        assert weight is not None
        store_weight(linear, weight.detach() if stored is None else stored, config)
        if linear.bias is not None:
            linear.bias.requires_grad_(False)
        linear.__class__ = FP8Linear
        assert isinstance(linear, FP8Linear)
        linear.config, linear.weight_dtype = config, weight.dtype
        return linear

    @property
    def weight(self) -> Tensor:
        """Weight [N, K] in `weight_dtype`, dequantized when it is read."""
        if CODES not in self._buffers:
            raise AttributeError("weight")  # while nn.Linear.__init__ runs; nn.Module looks on
        shape = self.out_features, self.in_features
        weight = torch.empty(shape, dtype=self.weight_dtype, device="meta").as_subclass(ReadOnlyWeight)
        weight.owner = self
        return weight

    @weight.setter
    def weight(self, value: Tensor) -> None:
        if getattr(value, "owner", None) is self:  # PEFT's unload gives a linear its own weight
            return
        if self not in _WRITERS:
            raise RuntimeError(_LOST)
        _WRITERS[self](self, value.detach().to(self.weight_dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        super()._apply(fn, recurse)
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype  # as a stored weight would: .to(dtype)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, [..., K] to [..., N]."""
        return run_stored_linear(self, x, self.config)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (weight := state_dict.get(f"{prefix}weight")) is not None and f"{prefix}{CODES}" not in state_dict:
            loaded = {"_extra_state": self.get_extra_state(), **weight_buffers(weight.detach(), self.config)}
            state_dict = {**state_dict, **{f"{prefix}{name}": x for name, x in loaded.items()}}
            del state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> Tensor:
        """The weight format's name as ASCII codes: the buffers alone do not distinguish e4m3 from e5m2."""
        return torch.tensor(list(self.config.weight_format.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError unless the loaded codes have this layer's format."""
        loaded = bytes(state.tolist()).decode()
        if loaded != self.config.weight_format:
            raise ValueError(
                f"weight_format={self.config.weight_format!r}: the loaded weight is {loaded!r}; "
                f"convert the model with FP8LinearConfig(weight_format={loaded!r})"
            )

    def to_linear(self) -> nn.Linear:
        """Convert back in place to nn.Linear with the dequantized weight (frozen)."""
        weight = self.weight.data
        drop_weight(self)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        return self

    def extra_repr(self) -> str:
        """Sizes and formats."""
        c = self.config
        gemm = f"input={c.input_format}/{c.input_granularity}, grad={c.grad_format}" if c.use_fp8_gemm else "bf16 GEMM"
        return f"{super().extra_repr()}, weight={c.weight_stored_as}, {gemm}"


class FP8TrainableLinear(nn.Linear):
    """nn.Linear whose high precision weight is trained with FP8 GEMMs (full fine-tuning)."""

    config: FP8LinearConfig  # formats and granularities
    trained_codes: TrainedCodes  # the cached codes of the weight; not in the state dict

    @staticmethod
    def from_linear(linear: nn.Linear, config: FP8LinearConfig | None = None) -> FP8TrainableLinear:
        """Convert a linear layer in place, keeping its parameters; errors as in `FP8Linear.from_linear`."""
        reason = obstacle_to_conversion(linear)
        if reason is not None:
            raise ValueError(f"{type(linear).__name__}({linear.in_features}, {linear.out_features}): {reason}")
        config = config or FP8LinearConfig()
        if config.weight_format not in FORMATS:
            raise ValueError(f"weight_format={config.weight_format!r}: is for frozen weights; write e4m3 or e5m2")
        linear.__class__ = FP8TrainableLinear
        assert isinstance(linear, FP8TrainableLinear)
        linear.config, linear.trained_codes = config, TrainedCodes()
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, [..., K] to [..., N]."""
        hand_over_input(self, x, self.config)
        return fp8_trainable_linear(x, self.weight, self.bias, self.config, self.trained_codes)

    def to_linear(self) -> nn.Linear:
        """Convert back in place to nn.Linear."""
        del self.trained_codes
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def extra_repr(self) -> str:
        """Sizes and formats."""
        c = self.config
        formats = f"weight={c.weight_stored_as}{' kept' if c.cache_weight else ''}, input={c.input_format}/"
        return f"{super().extra_repr()}, {formats}{c.input_granularity}, grad={c.grad_format}, wgrad={c.wgrad_format}"


def obstacle_to_conversion(linear: nn.Linear) -> str | None:
    """Why this layer cannot become FP8, or None."""
    weight = linear._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or type(weight.data) is not Tensor:
        return "its weight is not a plain floating parameter (already quantized?)"
    if linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
        return f"in and out features must be multiples of {ALIGNMENT}"
    return None


def replace_linear_with_fp8(
    model: nn.Module,
    config: FP8LinearConfig | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    trainable: bool = False,
) -> nn.Module:
    """Convert nn.Linear layers to FP8Linear in place, the model itself too if it is one; returns the model.

    `filter_fn(module, full_name)` returning False leaves a layer alone. `trainable` keeps high precision weights and
    trains them (`FP8TrainableLinear`). `model.fp8_report` names converted layers, and skipped ones with the reason.
    """
    target = FP8TrainableLinear if trainable else FP8Linear
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if isinstance(module, (FP8Linear, FP8TrainableLinear)):
            skipped[name] = "already FP8"
        elif not ADAPTER_PARTS.isdisjoint(name.split(".")):
            skipped[name] = "a LoRA matrix: never quantized"
        elif filter_fn is not None and not filter_fn(module, name):
            skipped[name] = "excluded by the filter"
        elif type(module) is not nn.Linear:
            skipped[name] = f"a subclass of nn.Linear ({type(module).__name__})"
        elif (reason := obstacle_to_conversion(module)) is not None:
            skipped[name] = reason
        else:
            target.from_linear(module, config)
            converted.append(name)
    fit_to_diffusers(model)
    model.fp8_report = {"converted": converted, "skipped": skipped}  # type: ignore[assignment]
    counts = "".join(f"; {count} left: {reason}" for reason, count in Counter(skipped.values()).items())
    logger.info("%s: %d linear layers in FP8%s", type(model).__name__, len(converted), counts)
    return model


def restore_linear(model: nn.Module) -> nn.Module:
    """Convert every FP8 linear back to nn.Linear in place; frozen ones get their dequantized weight."""
    for module in model.modules():
        if isinstance(module, (FP8Linear, FP8TrainableLinear)):
            module.to_linear()
    if vars(model).get("save_pretrained") is _not_saved:
        del model.save_pretrained, model.num_parameters
    return model


def _stored(model: nn.Module) -> dict[str, FP8Linear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, FP8Linear)}


def fit_to_diffusers(model: nn.Module, on_meta: bool = False) -> None:
    """Let diffusers' methods see a model's codes, in place; `restore_linear` undoes it.

    `save_pretrained` raises: `from_pretrained` would leave those weights random. `num_parameters` counts them, and
    `state_dict` has `weight`, for `load_lora_weights`. ValueError if parameters are on meta, unless `on_meta`.
    """
    if not hasattr(model, "save_pretrained") or not _stored(model):
        return
    if not on_meta and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "from_pretrained reads weights after __init__: convert what it returns, or pass low_cpu_mem_usage=False"
        )
    model.save_pretrained = _not_saved  # type: ignore[assignment]
    model.num_parameters = functools.partial(_num_parameters, model)  # type: ignore[assignment]
    if _answer_for_weights not in model._state_dict_hooks.values():
        model._register_state_dict_hook(_answer_for_weights)


def _not_saved(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "save_pretrained: from_pretrained cannot read FP8 linears; call coat_core.restore_linear(model) first, or "
        "save the LoRA alone (save_lora_adapter)"
    )


def _num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    count: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    return count + sum(each.weight.numel() for each in _stored(model).values() if not only_trainable)


class _StateDict(OrderedDict[str, Any]):
    """A state dict that has no weight of an FP8 linear, and gives it."""

    linears: dict[str, FP8Linear]

    def __missing__(self, key: str) -> Tensor:
        path, _, name = key.rpartition(".")
        if name != "weight" or path not in self.linears:
            raise KeyError(key)
        return self.linears[path].weight

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), {"_metadata": vars(self).get("_metadata")}, None, iter(self.items())


def _answer_for_weights(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
    answers = _StateDict(state)
    vars(answers).update(vars(state))  # _metadata
    answers.linears = {name.replace(".base_layer", ""): each for name, each in _stored(model).items()}
    return answers


@contextmanager
def allow_merging(model: nn.Module) -> Iterator[None]:
    """Let PEFT and diffusers write weights of FP8 linears: merge_adapter, fuse_lora, PiSSA, OLoRA.

    Each is quantized again; one warning at the end has the SQNR in dB of the weights and of their change. Unmerging
    restores the earlier codes. RuntimeError where codes are streamed, or an initialization wrote the weight, too.
    """
    norms: list[Tensor] = []

    @torch.no_grad()
    def requantize(linear: FP8Linear, value: Tensor) -> None:
        before = linear.weight.data
        layers = [each for each in model.modules() if hasattr(each, "merged_adapters")]
        layer: Any = next((each for each in layers if each.base_layer is linear), None)
        if layer is not None:
            if not layer.merged_adapters:
                bias = None if linear.bias is None else linear.bias.clone()
                layer.unmerge = functools.partial(_unmerge, layer, dict(linear.named_buffers()), bias)
                layer.writes = 0
            layer.writes += 1
        _set_buffers(linear, weight_buffers(value, linear.config))
        norms.append(torch.stack([x.double().norm() for x in (value, value - before, value - linear.weight)]).cpu())

    linears = _stored(model).values()
    if any("fetch_weight" in vars(linear) for linear in linears):
        raise RuntimeError("allow_merging: the codes are in CPU memory; set memory.stream_blocks: 0")
    _WRITERS.update(dict.fromkeys(linears, requantize))
    try:
        yield
    finally:
        for linear in linears:
            _WRITERS.pop(linear, None)
        if norms:
            whole, change, error = torch.stack(norms).square().sum(0)
            cost = [10 * torch.log10(x / error) for x in (whole, change)]
            text = "%s: %d weights quantized again: %.1f dB, of the change %.1f dB"
            logger.warning(text, type(model).__name__, len(norms), *cost)


def _set_buffers(linear: FP8Linear, buffers: dict[str, Tensor]) -> None:
    is_transposed, device = TRANSPOSED in linear._buffers, linear.weight.device
    drop_weight(linear)
    for name, x in buffers.items():
        linear.register_buffer(name, x.to(device))
    if is_transposed:
        keep_transposed(linear, linear.config)


def _unmerge(layer: Any, before: dict[str, Tensor], bias: Tensor | None) -> None:
    if layer.writes != len(layer.merged_adapters):
        raise RuntimeError("unmerge: an adapter's initialization changed the weight, too; load the model again")
    linear = layer.get_base_layer()
    _set_buffers(linear, before)
    if bias is not None:
        linear.bias.data = bias.to(linear.bias)
    layer.merged_adapters.clear()
    del layer.unmerge
