"""One block of each kind that a reader knows, with adapters, and what it is called with.

As a program in ai-toolkit's environment: the largest differences of its own blocks and LoRA from their fused forms.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.config import FP8LinearConfig
from coat_core.linear.module import FP8Linear
from coat_flux.blocks.fused.chooser import fused_block
from tests.helpers.flux import tiny_flux
from tests.helpers.toolkit_lora import Network, attach_network

TEXT, IMAGE, PADDING, BATCH, RANK = 24, 40, 7, 2, 4
TOOLKIT_LAYERS = "extensions_built_in.diffusion_models.chroma.src.layers"
TOOLKIT_FLUX2 = "extensions_built_in.diffusion_models.flux2.src.model"
TOOLKIT_KREA2 = "extensions_built_in.diffusion_models.krea2.src.mmdit"


@dataclass(frozen=True)
class Family:
    """A kind of block.

    `call` makes a block's arguments of an object with `text`, `image`, `both`, `vectors`, `angles` [S, d / 2] and
    `seen`, a mask of tokens.
    """

    make: Callable[[int, int], nn.Module]  # of hidden size and heads, its weights at their initialization
    call: Callable[[Any], tuple[Any, ...]]
    vectors: int | None  # that it takes, of the hidden size; None of a block without modulation
    hidden: int = 3072  # at the model's real width
    text: int = 512  # tokens
    head: int = 0  # size; 0 for 128, and less in small blocks
    few: int = 2  # heads of a small block
    small: int = 256  # hidden size of a block whose linears become FP8: their widths must be multiples of 16

    def heads(self, hidden: int) -> int:
        if self.head:
            return hidden // self.head
        return self.few if hidden < 1024 else hidden // 128


def _tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1)


def _of_diffusers(name: str, module: str) -> Callable[[int, int], nn.Module]:
    def make(hidden: int, heads: int) -> nn.Module:
        cls = getattr(importlib.import_module(f"diffusers.models.transformers.{module}"), name)
        return cls(hidden, heads, hidden // heads)

    return make


def toolkit_layers() -> Any:
    """ai-toolkit's module, where this Python can import it; else the stand-in."""
    root = os.environ.get("AI_TOOLKIT_ROOT")
    if __name__ != "__main__" or root is None:
        return importlib.import_module("tests.helpers.bfl_blocks")
    sys.path.insert(0, root)
    return importlib.import_module(TOOLKIT_LAYERS)


def _toolkit_double(hidden: int, heads: int) -> nn.Module:
    own = {} if "bfl_blocks" in toolkit_layers().__name__ else {"mlp_ratio": 4.0, "qkv_bias": True}
    return toolkit_layers().DoubleStreamBlock(hidden, heads, **own)


def _pe(of: Any) -> Tensor:
    cos, sin = of.angles.cos(), of.angles.sin()
    pe = torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))
    return pe.expand(len(of.both), 1, *pe.shape)


def _modulation(vectors: Tensor) -> Any:
    return toolkit_layers().ModulationOut(*vectors.split(1, dim=1))


def _mask_of_all_heads(of: Any) -> Tensor:
    pairs = of.seen[:, None, None] & of.seen[:, None, :, None]
    return pairs.expand(-1, of.both.shape[-1] // (2 * of.angles.shape[1]), -1, -1)


def _call_flux(of: Any) -> tuple[Any, ...]:
    return of.image, of.text, of.vectors, _tables(of.angles), None


def _call_toolkit_double(of: Any) -> tuple[Any, ...]:
    parts = [_modulation(three) for three in of.vectors.split(3, dim=1)]
    return of.image, of.text, _pe(of), [parts[:2], parts[2:]], _mask_of_all_heads(of)


def _call_qwen_image(of: Any) -> tuple[Any, ...]:
    sizes = [of.text.shape[1], of.image.shape[1]]
    of_text, of_image = torch.polar(torch.ones_like(of.angles), of.angles).split(sizes)
    return of.image, of.text, of.seen[:, : sizes[0]], of.vectors, (of_image, of_text), None, None


def _joint(hidden: int, heads: int, **options: Any) -> nn.Module:
    from diffusers.models.attention import JointTransformerBlock

    return JointTransformerBlock(hidden, heads, hidden // heads, qk_norm="rms_norm", **options)


def _call_sd3(of: Any) -> tuple[Any, ...]:
    return of.image, of.text, of.vectors, None


def _z_image(modulation: bool) -> Callable[[int, int], nn.Module]:
    def make(hidden: int, heads: int) -> nn.Module:
        cls = importlib.import_module("diffusers.models.transformers.transformer_z_image").ZImageTransformerBlock
        block = cls(0, hidden, heads, heads, 1e-5, True, modulation)
        for norm in (each for each in block.modules() if type(each).__name__ == "RMSNorm"):
            norm.weight.data += torch.randn(norm.weight.shape) / 4
        return block

    return make


def _call_z_image(of: Any) -> tuple[Any, ...]:
    """Images at positions of their own: tokens of the second are twice as far from each other."""
    angles = of.angles * torch.arange(1, len(of.both) + 1, device=of.angles.device)[:, None, None]
    return of.both, of.seen, torch.polar(torch.ones_like(angles), angles), of.vectors[:, :256], None, None, None


def _call_flux2_double(of: Any) -> tuple[Any, ...]:
    of_image, of_text = of.vectors.flatten(1).chunk(2, dim=1)
    return of.image, of.text, of_image, of_text, _tables(of.angles), None


def _of_toolkits_flux2(name: str) -> Callable[[int, int], nn.Module]:
    return lambda hidden, heads: getattr(importlib.import_module(TOOLKIT_FLUX2), name)(hidden, heads, mlp_ratio=3.0)


def _call_toolkits_flux2_double(of: Any) -> tuple[Any, ...]:
    pe, parts, text = _pe(of), of.vectors.split(1, dim=1), of.text.shape[1]
    modulations = [(parts[start : start + 3], parts[start + 3 : start + 6]) for start in (0, 6)]
    return of.image, of.text, pe[:, :, text:], pe[:, :, :text], *modulations


def _krea2(name: str, of_text: bool, grouped: int) -> Callable[[int, int], nn.Module]:
    """diffusers' block, its norms and table not at their initialization; `grouped`: heads of q for each of k and v."""

    def make(hidden: int, heads: int) -> nn.Module:
        module = importlib.import_module("diffusers.models.transformers.transformer_krea2")
        width, of_k = (hidden * 27 // 160 if of_text else hidden * 8 // 48) * 16, max(heads // grouped, 1)
        sizes = (hidden, heads, of_k, width) if of_text else (hidden, width, heads, of_k)
        return _drawn(getattr(module, name)(*sizes, 1e-5))

    return make


def _toolkits_krea2(name: str, grouped: int) -> Callable[[int, int], nn.Module]:
    def make(hidden: int, heads: int) -> nn.Module:
        return _drawn(getattr(importlib.import_module(TOOLKIT_KREA2), name)(hidden, heads, 4, False, heads // grouped))

    return make


def _drawn(block: nn.Module) -> nn.Module:
    for name, parameter in block.named_parameters():
        if "norm" in name or "table" in name or "mod" in name:
            nn.init.normal_(parameter, std=0.25)
    return block


FAMILIES = {
    "flux double": Family(_of_diffusers("FluxTransformerBlock", "transformer_flux"), _call_flux, 0),
    "flux single": Family(_of_diffusers("FluxSingleTransformerBlock", "transformer_flux"), _call_flux, 0),
    "chroma double": Family(
        _of_diffusers("ChromaTransformerBlock", "transformer_chroma"),
        lambda of: (of.image, of.text, of.vectors, _tables(of.angles), of.seen, None),
        12,
    ),
    "chroma single": Family(
        _of_diffusers("ChromaSingleTransformerBlock", "transformer_chroma"),
        lambda of: (of.both, of.vectors, _tables(of.angles), of.seen, None),
        3,
    ),
    "qwen image": Family(_of_diffusers("QwenImageTransformerBlock", "transformer_qwenimage"), _call_qwen_image, 0),
    "z-image": Family(_z_image(True), _call_z_image, 0, hidden=3840, small=384),
    "z-image refiner": Family(_z_image(False), lambda of: _call_z_image(of)[:3], None, hidden=3840, small=384),
    "toolkit's chroma double": Family(_toolkit_double, _call_toolkit_double, 12),
    "toolkit's chroma single": Family(
        lambda hidden, heads: toolkit_layers().SingleStreamBlock(hidden, heads),
        lambda of: (of.both, _pe(of), _modulation(of.vectors), _mask_of_all_heads(of)),
        3,
    ),
    "sd3": Family(_joint, _call_sd3, 0, 2432, 333, 64),
    "sd3's last": Family(partial(_joint, context_pre_only=True), _call_sd3, 0, 2432, 333, 64),
}


QWEN_IMAGE_IN = (0, 39)  # diffusers before hands its blocks another mask, and is not read with one
if tuple(int(part) for part in diffusers.__version__.split(".")[:2]) < QWEN_IMAGE_IN:
    del FAMILIES["qwen image"]
if hasattr(diffusers, "Flux2Transformer2DModel"):
    double, single = "Flux2TransformerBlock", "Flux2SingleTransformerBlock"
    FAMILIES["flux2 double"] = Family(_of_diffusers(double, "transformer_flux2"), _call_flux2_double, 12, hidden=6144)
    FAMILIES["flux2 single"] = Family(
        _of_diffusers(single, "transformer_flux2"),
        lambda of: (of.both, None, of.vectors.flatten(1), _tables(of.angles), None),
        3,
        hidden=6144,
    )
if hasattr(diffusers, "Krea2Transformer2DModel"):
    FAMILIES["krea2"] = Family(
        _krea2("Krea2TransformerBlock", False, 4),
        lambda of: (of.both, of.vectors.flatten(1)[:, None], _tables(of.angles), of.seen[:, None, None]),
        6,
        hidden=6144,
        few=8,
    )
    FAMILIES["krea2 text"] = Family(
        _krea2("Krea2TextFusionBlock", True, 1), lambda of: (of.both, of.seen[:, None, None]), None, hidden=2560
    )
# which have no stand-in
TOOLKITS_OWN = {
    "toolkit's flux2 double": Family(_of_toolkits_flux2("DoubleStreamBlock"), _call_toolkits_flux2_double, 12),
    "toolkit's flux2 single": Family(
        _of_toolkits_flux2("SingleStreamBlock"), lambda of: (of.both, _pe(of), of.vectors.split(1, dim=1)), 3
    ),
    "toolkit's krea2": Family(
        _toolkits_krea2("SingleStreamBlock", 2),
        lambda of: (of.both, of.vectors.flatten(1)[:, None], _pe(of)[:, 0], _mask_of_all_heads(of)[:, :1], *[None] * 3),
        6,
    ),
    "toolkit's krea2 text": Family(_toolkits_krea2("TextFusionBlock", 1), lambda of: (of.both, None), None),
}


FLUX1 = ("flux double", "flux single")
OTHERS = [name for name in FAMILIES if name not in FLUX1]


@dataclass
class Made:
    """A block and its call."""

    block: nn.Module
    args: tuple[Any, ...]
    leaves: dict[str, Tensor]  # what has gradients, by name
    network: Any = None  # ai-toolkit's adapters, where it has those


def linears(block: nn.Module, start: tuple[str, ...] = ("",)) -> list[str]:
    """Names of those that begin so."""
    modules = block.named_modules()
    return [name for name, module in modules if isinstance(module, nn.Linear) and name.startswith(start)]


def made(
    name: str,
    dtype: torch.dtype = torch.float32,
    hidden: int = 64,
    tokens: tuple[int, int] = (TEXT, IMAGE),
    fp8: FP8LinearConfig | None = None,
    adapters: str = "peft",
    rank: int = RANK,
    device: str = "cpu",
    trains: tuple[str, ...] = ("text", "image", "both", "vectors"),
    adapted: tuple[str, ...] = ("",),
    batch: int = BATCH,
    block: nn.Module | None = None,
    **lora: Any,
) -> Made:
    """The block frozen, with adapters on its linears, none zero, and the last text tokens of an image padded.

    `trains`: inputs that have gradients; `adapted`: what names of linears with adapters begin with; `block`: a
    frozen one instead of one that is made here; `lora`: options of the adapters.
    """
    draw = torch.Generator().manual_seed(0)
    family = FAMILIES[name]
    torch.manual_seed(0)
    heads = family.heads(hidden)
    with torch.device(device):
        if block is None:
            block = family.make(hidden, heads).to(dtype).requires_grad_(False).train()
        for linear in linears(block) if fp8 is not None else ():
            FP8Linear.from_linear(block.get_submodule(linear), fp8)
        network = _adapted(block, adapters, linears(block, adapted), rank, lora)
    leaves = {} if network is None else dict(network.named_parameters())
    leaves |= {each: p for each, p in block.named_parameters() if p.requires_grad}
    for each, parameter in leaves.items() if device == "cpu" else ():  # elsewhere nobody has values
        is_small = any(part in each for part in ("lora_B", "lora_up", "lokr_w2"))
        spread = 0.1 if is_small else parameter.shape[-1] ** -0.5
        parameter.data = (torch.randn(parameter.shape, generator=draw) * spread).to(parameter.dtype)
    batch = batch if device == "cpu" else 1
    shapes = {"text": (batch, tokens[0], hidden), "image": (batch, tokens[1], hidden)}
    shapes |= {"both": (batch, sum(tokens), hidden)}
    shapes |= {"vectors": (batch, family.vectors, hidden) if family.vectors else (batch, hidden)}
    draws = {} if device != "cpu" else {"generator": draw}
    inputs = {each: torch.randn(shape, device=device, **draws).to(dtype) for each, shape in shapes.items()}
    for each, x in inputs.items():
        x.requires_grad_(each in trains)
    angles = torch.outer(torch.arange(sum(tokens)), 1e4 ** -torch.linspace(0, 1, hidden // heads // 2)).to(device)
    seen = torch.ones(batch, sum(tokens), dtype=torch.bool)
    seen[-1, tokens[0] - PADDING : tokens[0]] = False
    args = family.call(SimpleNamespace(**inputs, angles=angles, seen=seen.to(device)))
    given = {id(x) for x in tree_leaves(args)}
    if family.vectors is not None:
        given.add(id(inputs["vectors"]))
    used = {each: x for each, x in inputs.items() if id(x) in given and each in trains}
    return Made(block, args, used | leaves, network)


def _adapted(block: nn.Module, adapters: str, names: list[str], rank: int, lora: dict[str, Any]) -> Any:
    """PEFT's in the block; or ai-toolkit's next to it, which are returned."""
    if adapters == "toolkit":
        return Network([block.get_submodule(name) for name in names], rank, **lora).train()
    if adapters == "peft":
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, **lora), block)
    return None


STRENGTHS = {  # as ai-toolkit sets them, and the batch; guidance doubles it
    "one image": ([1.0], 1),
    "the same for all": ([0.7, 0.7, 0.7, 0.7], 4),
    "others": ([1.0, 0.25], 2),
    "others, doubled batch": ([1.0, -0.5], 4),
}


def with_strengths(
    name: str, strengths: float | list[float] = 1.0, batch: int = BATCH, dtype: torch.dtype = torch.float32
) -> Made:
    """A block of the tiny FLUX with ai-toolkit's LoRA, where it is installed its own, at a strength per image."""
    model = tiny_flux(dtype)
    network = attach_network(model, [each for each in linears(model) if "transformer_blocks." in each], RANK)
    network.multiplier = strengths
    block = (model.transformer_blocks if name == "flux double" else model.single_transformer_blocks)[0]
    of = made(name, dtype, adapters="none", batch=batch, block=block)
    own = set(block.modules())
    for i, lora in enumerate(each for each in network.unet_loras if each.org_module[0] in own):
        nn.init.normal_(lora.lora_up.weight, std=0.1)
        of.leaves |= {f"{i}.{each}": parameter for each, parameter in lora.named_parameters()}
    of.network = network
    return of


def results(run: Callable[..., Any], of: Made) -> dict[str, Tensor]:
    """Outputs, and gradients of all leaves for fixed output gradients."""
    outputs = [x for x in tree_leaves(run(*of.args)) if x is not None]
    draw = torch.Generator().manual_seed(5)
    own = {"device": outputs[0].device} if outputs[0].device.type != "cpu" else {"generator": draw}
    given = [torch.randn(x.shape, **own).to(x.dtype) for x in outputs]
    found = torch.autograd.grad(outputs, list(of.leaves.values()), given, retain_graph=True)
    return {f"output {i}": x.detach() for i, x in enumerate(outputs)} | dict(zip(of.leaves, found, strict=True))


def _relative(expected: Tensor, found: Tensor) -> float:
    """Their difference as a fraction of what is expected; infinite where that is nothing and something is found."""
    error, norm = float((found - expected).norm()), float(expected.norm())
    if not norm:
        return math.inf if error else 0.0
    return error / norm


def largest_difference(of: Made) -> tuple[float, str]:
    """Of outputs and gradients between the block and its fused form, everything kept as it is: relative, in norms."""
    expected, found = results(of.block, of), results(fused_block(of.block), of)
    errors = {key: _relative(x.double(), found[key].double()) for key, x in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


if __name__ == "__main__":
    FAMILIES.update(TOOLKITS_OWN)
    differences = {}
    for name in FAMILIES:
        if name.startswith("toolkit"):
            differences[name] = largest_difference(made(name, adapters="toolkit"))
        elif name in FLUX1:
            for case, of in STRENGTHS.items():
                differences[f"{name}, {case}"] = largest_difference(with_strengths(name, *of))
    assert toolkit_layers().__name__ == TOOLKIT_LAYERS
    json.dump(differences, sys.stdout)
