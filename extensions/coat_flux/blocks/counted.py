"""Blocks of any model of diffusers, counted like FLUX's: on the meta device, by what the model calls them with.

The model's own forward runs at the job's sizes, with blocks that only return what the first of equal ones would.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from coat_core.activation import keep_no_input

from .held import AsOnGPU, HeldTensors
from .hook import own_forward, release, take_over
from .models import Family, listed_blocks
from .sizes import CONVOLUTIONS, VALUES, Block, FlowSettings, Tokens

# keys of a transformer's config with the features of a text token
TEXT_WIDTHS = (
    "joint_attention_dim", "text_dim", "text_embed_dim", "cap_feat_dim", "caption_channels", "cross_attention_dim",
)  # fmt: skip


def text_width(config: Mapping[str, Any]) -> int:
    """Features of a text token, by a transformer's config."""
    return next((int(config[key]) for key in TEXT_WIDTHS if isinstance(config.get(key), int)), 0)


class DualWanTransformer3DModel(nn.Module):
    """Wan 2.2's two transformers, named as in ai-toolkit; a step calls one."""

    def __init__(self, first: Any, second: Any):
        super().__init__()
        self.transformer_1, self.transformer_2 = first, second
        self.config, self.forward = first.config, first.forward


class Probe:
    """A transformer or UNet on the meta device; `scale` is the side of a latent in pixels."""

    def __init__(self, model: Any, family: Family, scale: int):
        self.model, self.family, self.scale = model.requires_grad_(False).train(), family, scale
        self.blocks = list(listed_blocks(model, family.blocks).values())
        inside = {module for block in self.blocks for module in block.modules()}
        for module in model.modules():
            if isinstance(module, CONVOLUTIONS) and module not in inside:
                keep_no_input(module)

    def inputs(self, tokens: Tokens, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of the model's forward by their names, for one frame; an image token is 16 pixels wide."""
        config = self.model.config
        names = inspect.signature(self.model.forward).parameters
        batch, text, width = tokens.batch, tokens.text, text_width(config)
        height = math.isqrt(tokens.image)
        height = next((n for n in range(height, height // 2, -1) if tokens.image % n == 0), height)
        grid = height, tokens.image // height
        latent = config["in_channels"], *(16 * side // self.scale for side in grid)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        image = empty(batch, *latent)
        if "img_ids" in names or "img_shapes" in names:
            image = empty(batch, math.prod(grid), config["in_channels"])
        elif isinstance(config.get("patch_size"), list | tuple):  # of frames, too
            image = image[:, :, None]
        axes = len(config.get("axes_dims_rope") or ())
        made: dict[str, Any] = {
            **dict.fromkeys(("hidden_states", "sample"), image.requires_grad_()),
            "x": [empty(latent[0], 1, *latent[1:]).requires_grad_() for _ in range(batch)],
            **dict.fromkeys(("timestep", "t"), empty(batch)),
            "encoder_hidden_states": empty(batch, text, width),
            "cap_feats": [empty(text, width) for _ in range(batch)],
            "img_shapes": [[(1, *grid)]] * batch,
            "img_ids": empty(math.prod(grid), axes),
            "txt_ids": empty(text, axes),
            **dict.fromkeys(("original_size", "target_size", "crop_coords"), empty(batch, 2)),
            "pooled_projections": empty(batch, config.get("pooled_projection_dim") or 0),
        }
        conditions = {"resolution": empty(batch, 2), "aspect_ratio": empty(batch, 1), "time_ids": empty(batch, 6)}
        if config.get("addition_embed_type") == "text_time":
            pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
            conditions["text_embeds"] = empty(batch, pooled)
        made["added_cond_kwargs"] = conditions
        mask = "encoder_attention_mask"
        if mask in names and names[mask].default is inspect.Parameter.empty:
            made[mask] = torch.ones(batch, text, dtype=torch.bool, device="cpu")  # its values are read
        return {name: value for name, value in made.items() if name in names}


class Calls(NamedTuple):
    """The calls of a model's blocks in one forward pass, by index of the block."""

    args: dict[int, tuple[Any, ...]]  # tensors through which a gradient goes require one
    alike: dict[int, int]  # the last of equal blocks
    around: int  # bytes saved outside the blocks


@functools.lru_cache(maxsize=16)
@_disable_current_modes()
@torch.inference_mode(False)
@torch.enable_grad()
def calls_of(probe: Probe, tokens: Tokens, value_bytes: int, cuda: bool) -> Calls:
    """Run the model's forward on the meta device, for one micro-batch."""
    dtype = VALUES[value_bytes]
    model = nn.Module.to(probe.model, dtype)  # diffusers' own warns
    source = torch.ones((), dtype=dtype, device="meta", requires_grad=True)
    places = {block: i for i, block in enumerate(probe.blocks)}
    args: dict[int, tuple[Any, ...]] = {}
    keys: dict[int, Any] = {}
    returned: dict[Any, Any] = {}

    def stub(block: nn.Module, *given: Any, **options: Any) -> Any:
        shapes = tree_map_only(Tensor, lambda x: x.shape, tree_leaves((given, options)))
        key = keys[places[block]] = type(block), *(p.shape for p in block.parameters()), *map(str, shapes)
        with _disable_current_modes():
            if key not in returned:
                with torch.no_grad():
                    returned[key] = own_forward(block)(*given, **options)
            made = [torch.empty_like(x, requires_grad=True) if _is_trained(x) else x for x in given]
            args[places[block]] = tuple(made)
        trained = [x.sum() for x in given if _is_trained(x)]
        through = torch.stack(trained or [source]).sum()  # what was saved before the block stays
        return tree_map_only(Tensor, lambda x: through.expand(x.shape).to(x.dtype) * 1, returned[key])

    take_over(model, probe.blocks, stub, lambda _: None)
    try:
        with torch.device("meta"), AsOnGPU(cuda), HeldTensors() as held:
            outputs = tree_leaves(model(**probe.inputs(tokens, dtype), return_dict=False))
            around = held.now - sum(x.untyped_storage().nbytes() for x in outputs)
    finally:
        for block in probe.blocks:
            release(block)
    last = {key: i for i, key in keys.items()}
    return Calls(args, {i: last[key] for i, key in keys.items()}, around)


def _is_trained(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


@dataclass(frozen=True)
class CountedBlock(Block):
    """A block of a `Probe`: the one at `index`, or one that equals it. It has no `hidden`, `heads` and `mlp`."""

    probe: Any = None
    index: int = 0

    def shape(self, name: str) -> tuple[int, int]:
        """See `Block`."""
        linear: Any = self.probe.blocks[self.index].get_submodule(name)
        return linear.in_features, linear.out_features

    def modulates(self, name: str) -> bool:
        """See `Block`."""
        return name.endswith(self.probe.family.one_row)

    def make(self) -> nn.Module:
        """See `Block`."""
        return copy.deepcopy(self.probe.blocks[self.index])

    def arguments(self, tokens: Tokens, settings: FlowSettings) -> Callable[[], list[Any]]:
        """See `Block`."""
        template = calls_of(self.probe, tokens, settings.value_bytes, settings.cuda).args[self.index]
        source = torch.ones((), device="meta", requires_grad=self.trained_input)

        return lambda: [source.to(x.dtype).expand(x.shape) * 1 if _is_trained(x) else x for x in template]

    def around(self, tokens: Tokens, settings: FlowSettings) -> int:
        """See `Block`."""
        return calls_of(self.probe, tokens, settings.value_bytes, settings.cuda).around
