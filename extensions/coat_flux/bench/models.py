"""The transformer of a row: built with random weights, converted as the row says, with its LoRA.

Rows whose weights are the same take turns with one model where a process measures several: what differs (recomputation,
compilation, COAT's flow) is set on it again, and the LoRA starts over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..blocks.apply import apply_coat
from ..blocks.gemms import set_transposed
from ..blocks.lora import attach_lora
from ..blocks.models import FLUX
from ..blocks.runner import BlockRunner
from ..config.coat import COATConfig
from ..mini_flux.geometry import make_flux_dev_geometry
from ..trainers.standalone.network import add_lora, lora_parameters, lora_targets
from .configurations import Configuration
from .limits import Geometry
from .timing import SEED

B_STD = 0.02  # of the adapters' B, which training leaves zero after the first step
BUILD_ROOM = 1.3  # a model is made on the GPU when so many times its bytes are free there
TORCHS_PRECISION = "highest"  # of fp32 products; the stand-alone engine allows TF32 with COAT, ai-toolkit does not


def model_of(
    row: Configuration, geometry: Geometry, device: torch.device, kept: dict[str, Any]
) -> tuple[Any, list[nn.Parameter]]:
    """Make the model of a row, or take the one that the last row left.

    Args:
        row: what the model is.
        geometry: its size.
        device: where it runs.
        kept: the last model with its `Configuration.weights`, replaced by this one.

    Returns:
        (transformer in training mode, trained parameters).
    """
    key = (row.weights, geometry)
    if kept.get("key") != key:
        kept.clear()
        release(device)
        model = _make_model(geometry, device)
        _convert(model, row, geometry, device)
        lora = lora_parameters(model)
        draw = torch.Generator(device).manual_seed(SEED + 1)
        for name, parameter in lora.items():
            if ".lora_B." in name:  # with B = 0 half of the backward pass would multiply zeros
                nn.init.normal_(parameter, 0.0, B_STD, generator=draw)
        kept.update(key=key, model=model, start=[parameter.detach().cpu().clone() for parameter in lora.values()])
    model = kept["model"]
    release(device)
    _set_mode(model, row)
    trained = list(lora_parameters(model).values())
    for parameter, start in zip(trained, kept["start"], strict=True):
        parameter.data.copy_(start)
        parameter.grad = None
    return model.train(), trained


def runner_of(model: Any) -> Callable[..., Any]:
    """What runs each block with its arguments; diffusers has a function also where it is not used."""
    own = model._gradient_checkpointing_func if model.gradient_checkpointing else run_plainly
    return BlockRunner.of(model) or own


def run_plainly(block: nn.Module, *args: Any) -> Any:
    """Call a block."""
    return block(*args)


def release(device: torch.device) -> None:
    """Give back what compiled code, recorded graphs and what was dropped before hold."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _make_model(geometry: Geometry, device: torch.device) -> Any:
    """A frozen bf16 transformer; on the device if it fits there with room, else on the CPU, to be converted first."""
    sizes = {
        "num_layers": geometry.double,
        "num_single_layers": geometry.single,
        "num_attention_heads": geometry.heads,
    }
    place = device
    if device.type == "cuda":
        plain = make_flux_dev_geometry("meta", **sizes)
        needed = 2 * sum(parameter.numel() for parameter in plain.parameters())
        if BUILD_ROOM * needed > torch.cuda.mem_get_info(device)[0]:
            place = torch.device("cpu")
    return make_flux_dev_geometry(place, torch.bfloat16, seed=SEED, **sizes)


def _convert(model: Any, row: Configuration, geometry: Geometry, device: torch.device) -> None:
    """Convert the linears as the row says, in place, and add the LoRA."""
    config = None if row.coat is None else COATConfig.from_dict(dict(row.coat))
    targets = lora_targets(model)
    if config is not None:
        apply_coat(model, config, device=device)
    elif row.quantizer:
        QUANTIZERS[row.quantizer](model)
    model.to(device)
    add_lora(model, targets, geometry.rank, seed=SEED)
    if config is not None:
        attach_lora(model, config)
    if row.adapters == "bf16":
        for parameter in lora_parameters(model).values():
            parameter.data = parameter.data.to(torch.bfloat16)


def _set_mode(model: Any, row: Configuration) -> None:
    """Recomputation, compilation and flow, which a model may have had otherwise before."""
    torch.set_float32_matmul_precision(TORCHS_PRECISION if row.coat is None else "high")
    blocks = [block for part in FLUX.lists for block in model.get_submodule(part.pattern)]
    for block in (model, *blocks):
        block._compiled_call_impl = None
    if row.coat is not None:
        set_transposed(blocks, False)
        BlockRunner.install(model, FLUX.blocks, COATConfig.from_dict(dict(row.coat)), allow_recompute=True)
        return
    if row.checkpointing:
        model.enable_gradient_checkpointing()
    else:
        model.disable_gradient_checkpointing()
    mode = {"mode": row.compile_mode} if row.compile_mode else {}
    if row.compiled == "blocks":
        model.compile_repeated_blocks(**mode)
    elif row.compiled == "model":
        model.compile(**mode)


def _to_quanto(model: nn.Module) -> None:
    """All linears, as ai-toolkit quantizes a transformer."""
    from optimum.quanto import freeze, qfloat8, quantize

    quantize(model, weights=qfloat8)
    freeze(model)


def _to_torchao(model: nn.Module, recipe: str = "tensorwise") -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def sees_tokens(_: nn.Module, name: str) -> bool:
        """Linears of the blocks, but for modulation: torchao's GEMM takes no batch of fewer than 16 rows."""
        return name.isdigit() or not name or ("transformer_blocks." in name and ".norm" not in name)

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, module_filter_fn=sees_tokens, config=config)


def _to_rowwise(model: nn.Module) -> None:
    _to_torchao(model, "rowwise")


def _to_convrot8(model: nn.Module) -> None:
    from ..trainers.ai_toolkit.host_quantizers import convert_linears

    convert_linears(model, "convrot8")


# names of `Configuration.quantizer`
QUANTIZERS: dict[str, Callable[[nn.Module], None]] = {
    "quanto": _to_quanto,
    "torchao": _to_torchao,
    "torchao_rowwise": _to_rowwise,
    "convrot8": _to_convrot8,
}
