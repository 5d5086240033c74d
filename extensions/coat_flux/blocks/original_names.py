"""What Black Forest Labs' checkpoints call the linears of FLUX.1 and FLUX.2, next to diffusers' names.

The original fuses what diffusers splits: one original name stands for one or more of diffusers'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OriginalLinear:
    """A linear of the original checkpoint, which fuses what diffusers splits. Sizes in units of the hidden size d.

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

    def within(self, ours: str, theirs: str) -> OriginalLinear:
        """The same linear inside a block: `ours` and `theirs` are diffusers' and the original's name of the block."""
        members = tuple(f"{ours}.{member}" for member in self.members)
        return OriginalLinear(f"{theirs}.{self.name}", members, self.heights, self.width, self.swapped)


# Source: diffusers' scripts/convert_flux_to_diffusers.py and its transformer_flux.py
FLUX_DOUBLE = (
    OriginalLinear("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v"), (1, 1, 1), 1),
    OriginalLinear("img_attn.proj", ("attn.to_out.0",), (1,), 1),
    OriginalLinear("img_mlp.0", ("ff.net.0.proj",), (4,), 1),
    OriginalLinear("img_mlp.2", ("ff.net.2",), (1,), 4),
    OriginalLinear("img_mod.lin", ("norm1.linear",), (6,), 1),
    OriginalLinear("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), (1, 1, 1), 1),
    OriginalLinear("txt_attn.proj", ("attn.to_add_out",), (1,), 1),
    OriginalLinear("txt_mlp.0", ("ff_context.net.0.proj",), (4,), 1),
    OriginalLinear("txt_mlp.2", ("ff_context.net.2",), (1,), 4),
    OriginalLinear("txt_mod.lin", ("norm1_context.linear",), (6,), 1),
)
FLUX_SINGLE = (
    OriginalLinear("linear1", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), (1, 1, 1, 4), 1),
    OriginalLinear("linear2", ("proj_out",), (1,), 5),
    OriginalLinear("modulation.lin", ("norm.linear",), (3,), 1),
)
FLUX_EMBEDDERS = (("time_in", "timestep"), ("vector_in", "text"), ("guidance_in", "guidance"))
FLUX_OUTSIDE = (
    OriginalLinear("img_in", ("x_embedder",), (1,), 0),
    OriginalLinear("txt_in", ("context_embedder",), (1,), 0),
    *(
        OriginalLinear(f"{name}.{layer}_layer", (f"time_text_embed.{kind}_embedder.linear_{number}",), (1,), width)
        for name, kind in FLUX_EMBEDDERS
        for layer, number, width in (("in", 1, 0), ("out", 2, 1))
    ),
    OriginalLinear("final_layer.adaLN_modulation.1", ("norm_out.linear",), (2,), 1, swapped=True),
    OriginalLinear("final_layer.linear", ("proj_out",), (0,), 1),
)

# Source: diffusers' scripts/convert_flux2_to_diffusers.py and its transformer_flux2.py
FLUX2_DOUBLE = tuple(
    linear
    for stream, ff, qkv, out in (
        ("img", "ff", ("to_q", "to_k", "to_v"), "to_out.0"),
        ("txt", "ff_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"),
    )
    for linear in (
        OriginalLinear(f"{stream}_attn.qkv", tuple(f"attn.{part}" for part in qkv), (1, 1, 1), 1),
        OriginalLinear(f"{stream}_attn.proj", (f"attn.{out}",), (1,), 1),
        OriginalLinear(f"{stream}_mlp.0", (f"{ff}.linear_in",), (6,), 1),
        OriginalLinear(f"{stream}_mlp.2", (f"{ff}.linear_out",), (1,), 3),
    )
)
FLUX2_SINGLE = (
    OriginalLinear("linear1", ("attn.to_qkv_mlp_proj",), (9,), 1),
    OriginalLinear("linear2", ("attn.to_out",), (1,), 4),
)
FLUX2_MODULATION = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
FLUX2_OUTSIDE = (
    OriginalLinear("img_in", ("x_embedder",), (1,), 0),
    OriginalLinear("txt_in", ("context_embedder",), (1,), 0),
    *(
        OriginalLinear(f"{name}.{layer}_layer", (f"time_guidance_embed.{kind}_embedder.linear_{number}",), (1,), width)
        for name, kind in (("time_in", "timestep"), ("guidance_in", "guidance"))
        for layer, number, width in (("in", 1, 0), ("out", 2, 1))
    ),
    *(
        OriginalLinear(f"{name}.lin", (f"{name}.linear",), (height,), 1)
        for name, height in zip(FLUX2_MODULATION, (6, 6, 3), strict=True)
    ),
    OriginalLinear("final_layer.adaLN_modulation.1", ("norm_out.linear",), (2,), 1, swapped=True),
    OriginalLinear("final_layer.linear", ("proj_out",), (0,), 1),
)
