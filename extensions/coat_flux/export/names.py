"""The linears of a FLUX transformer under both of their names: diffusers', and those of Black Forest Labs' checkpoint.

diffusers splits what the original fuses (q, k, v, and the MLP's first linear in single blocks), so one original name
stands for one or several of diffusers'. Heights and widths are in units of the model's hidden size d; 0: another size.

Source: diffusers' scripts/convert_flux_to_diffusers.py and its transformer_flux.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Linear", "original_linear", "place_of", "underscored"]


@dataclass(frozen=True)
class Linear:
    """One linear of the original.

    Attributes:
        name: in the original, in full where it belongs to a numbered block too.
        members: diffusers' names of its parts, top to bottom.
        heights: output features of each part, in units of d.
        width: input features, in units of d.
        swapped: the two halves of the output lie in the other order in diffusers (scale, shift for shift, scale).
    """

    name: str
    members: tuple[str, ...]
    heights: tuple[int, ...]
    width: int
    swapped: bool = False

    def within(self, ours: str, theirs: str) -> Linear:
        """The same linear inside a block: `ours` and `theirs` are diffusers' and the original's name of the block."""
        members = tuple(f"{ours}.{member}" for member in self.members)
        return Linear(f"{theirs}.{self.name}", members, self.heights, self.width, self.swapped)


DOUBLE = (
    Linear("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v"), (1, 1, 1), 1),
    Linear("img_attn.proj", ("attn.to_out.0",), (1,), 1),
    Linear("img_mlp.0", ("ff.net.0.proj",), (4,), 1),
    Linear("img_mlp.2", ("ff.net.2",), (1,), 4),
    Linear("img_mod.lin", ("norm1.linear",), (6,), 1),
    Linear("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), (1, 1, 1), 1),
    Linear("txt_attn.proj", ("attn.to_add_out",), (1,), 1),
    Linear("txt_mlp.0", ("ff_context.net.0.proj",), (4,), 1),
    Linear("txt_mlp.2", ("ff_context.net.2",), (1,), 4),
    Linear("txt_mod.lin", ("norm1_context.linear",), (6,), 1),
)
SINGLE = (
    Linear("linear1", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), (1, 1, 1, 4), 1),
    Linear("linear2", ("proj_out",), (1,), 5),
    Linear("modulation.lin", ("norm.linear",), (3,), 1),
)
EMBEDDERS = (("time_in", "timestep"), ("vector_in", "text"), ("guidance_in", "guidance"))
OUTSIDE = (
    Linear("img_in", ("x_embedder",), (1,), 0),
    Linear("txt_in", ("context_embedder",), (1,), 0),
    *(
        Linear(f"{name}.{layer}_layer", (f"time_text_embed.{kind}_embedder.linear_{number}",), (1,), width)
        for name, kind in EMBEDDERS
        for layer, number, width in (("in", 1, 0), ("out", 2, 1))
    ),
    Linear("final_layer.adaLN_modulation.1", ("norm_out.linear",), (2,), 1, swapped=True),
    Linear("final_layer.linear", ("proj_out",), (0,), 1),
)
BLOCKS = (("transformer_blocks", "double_blocks", DOUBLE), ("single_transformer_blocks", "single_blocks", SINGLE))

_IN_BLOCK = re.compile(r"(\w+)\.(0|[1-9]\d*)\.(.+)")
_IN_BLOCK_UNDERSCORED = re.compile(r"(double_blocks|single_blocks)_(0|[1-9]\d*)_(.+)")


def place_of(module: str) -> tuple[Linear, int]:
    """The linear that diffusers' `module` is a part of, and which part.

    Raises:
        KeyError: FLUX has no such linear.
    """
    for linear in _candidates(module, ours=True):
        if module in linear.members:
            return linear, linear.members.index(module)
    raise KeyError(module)


def original_linear(name: str) -> Linear:
    """The linear of this original name.

    Raises:
        KeyError: FLUX has no such linear.
    """
    for linear in _candidates(name, ours=False):
        if linear.name == name:
            return linear
    raise KeyError(name)


def underscored(name: str) -> str:
    """The original's name of a linear from its spelling with `_` for every dot.

    Raises:
        KeyError: FLUX has no such linear.
    """
    found = _IN_BLOCK_UNDERSCORED.fullmatch(name)
    block, rest = (f"{found[1]}.{found[2]}.", found[3]) if found else ("", name)
    table = next((table for _, theirs, table in BLOCKS if found and found[1] == theirs), OUTSIDE)
    for linear in table:
        if linear.name.replace(".", "_") == rest:
            return block + linear.name
    raise KeyError(name)


def _candidates(name: str, *, ours: bool) -> Iterator[Linear]:
    found = _IN_BLOCK.fullmatch(name)
    for diffusers, original, table in BLOCKS:
        if found and found[1] == (diffusers if ours else original):
            yield from (linear.within(f"{diffusers}.{found[2]}", f"{original}.{found[2]}") for linear in table)
    yield from OUTSIDE
