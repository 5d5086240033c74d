"""What is known of a family of models: the form that every file of this package fills in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..fused.forms import Reader

Size = tuple[int, int]  # features as so many hidden sizes d and so many MLP widths F
D, F, DF = (1, 0), (0, 1), (1, 1)
ANY = (0, 0)  # neither


@dataclass(frozen=True)
class Linear:
    """A linear of the original checkpoint, which fuses what diffusers splits."""

    name: str
    members: tuple[str, ...]  # diffusers' names of its parts, top to bottom
    outputs: tuple[Size, ...]  # features of each part
    inputs: Size
    swapped: bool = False  # diffusers has the output's halves in the other order (scale, shift for shift, scale)
    mlp_ratio: int = 4  # F / d

    @property
    def heights(self) -> tuple[int, ...]:
        """Output features of each part, in units of d; 0: another size."""
        return tuple(d + f * self.mlp_ratio for d, f in self.outputs)

    @property
    def width(self) -> int:
        """Input features, in units of d; 0: another size."""
        return self.inputs[0] + self.inputs[1] * self.mlp_ratio


def outside_linears(embedding: str, kinds: Mapping[str, str], *modulations: Linear) -> tuple[Linear, ...]:
    """The linears outside FLUX's blocks; `kinds`: the original's name of each embedder in `embedding` → diffusers'."""
    embedders = []
    for name, kind in kinds.items():
        for layer, number, inputs in (("in", 1, ANY), ("out", 2, D)):
            ours = f"{embedding}.{kind}_embedder.linear_{number}"
            embedders.append(Linear(f"{name}.{layer}_layer", (ours,), (D,), inputs))
    return (
        Linear("img_in", ("x_embedder",), (D,), ANY),
        Linear("txt_in", ("context_embedder",), (D,), ANY),
        *embedders,
        *modulations,
        Linear("final_layer.adaLN_modulation.1", ("norm_out.linear",), ((2, 0),), D, swapped=True),
        Linear("final_layer.linear", ("proj_out",), (ANY,), D),
    )


@dataclass(frozen=True)
class BlockList:
    """A list of blocks."""

    pattern: str  # of its module lists
    block: str = ""  # class of the blocks; empty if unknown
    reader: Reader | None = None  # for the fused flow; None: the generic one
    earlier: tuple[Reader, ...] = ()  # for the arguments of earlier diffusers
    fused_bytes: float = 0.0  # measured per element of hidden states in the fused flow, if `kind` is empty; 0: unknown
    kind: str = ""  # name of blocks whose bytes `blocks.sizes` counts
    source: str = ""  # diffusers' module with their class
    vectors: tuple[int, ...] = (1,)  # modulation vectors that are passed in, in units of d
    count: str = ""  # key of the model's config with their number
    original: str = ""  # name of the list in the original checkpoint
    linears: tuple[Linear, ...] = ()  # modulation first, the second linear of an MLP last
    norms: Mapping[str, str] = field(default_factory=dict)  # of a block, parameter in the original → diffusers' name


class Rates(NamedTuple):
    """Bytes kept per element of hidden states: in high precision with fp32 LoRA, packed, packed but for attention."""

    high_precision: float
    packed: float
    attention_kept: float


@dataclass(frozen=True)
class Family:
    """What is known of the models with one class of transformer.

    Patterns are fnmatch patterns over full module names, never substrings: `proj_out` would match FLUX's final
    projection and also the single blocks' `proj_out`, a quarter of the model's FLOPs.
    """

    transformer: str
    lists: tuple[BlockList, ...]  # in forward order
    archs: tuple[str, ...] = ()  # `model.arch` of ai-toolkit with this class
    one_row: tuple[str, ...] = ()  # endings of linears with one row per image (adaLN modulation): in high precision
    converted: tuple[str, ...] = ()  # patterns of FP8 linears, if not all of the lists
    left: Mapping[str, str] = field(default_factory=dict)  # patterns of linears that are left out → the reason
    pipelines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of diffusers → archs
    repositories: Mapping[str, str] = field(default_factory=dict)  # on the hub → arch, or what it is if not trained
    ungated: tuple[str, ...] = ()  # those of `repositories` without a license agreement
    # names on the hub → configs of the model's parts, as published, for `plan`
    models: Mapping[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    # arch → the file that ai-toolkit loads from a folder, whatever else is in it; or a pattern
    files: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, Rates] = field(default_factory=dict)  # class of a block without a reader → bytes (RESULTS.md)
    inputs: tuple[str, ...] = ()  # embedders of the blocks' streams
    conditioning: tuple[str, ...] = ()  # embedders of the modulation's input, and modulations outside the blocks
    outside: tuple[Linear, ...] = ()  # linears outside the blocks, under both names
    folders: tuple[str, ...] = ()  # of a model in diffusers layout
    # text encoder → config key of its width, transformer key that must agree, number of its layers
    text_features: Mapping[str, tuple[str, str, int]] = field(default_factory=dict)
    lora_loader: str = ""  # diffusers' class that loads its LoRAs
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # layout of a LoRA → others that load it
    # configs of a model's parts → the parts, on the default device; the larger text encoder last
    parts: Callable[[Mapping[str, dict[str, Any]]], dict[str, Any]] | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """Patterns of the block lists, in forward order."""
        return tuple(each.pattern for each in self.lists)

    @property
    def convert(self) -> tuple[str, ...]:
        """Patterns of the linears whose weights become FP8; all others stay in high precision."""
        return self.converted or tuple(f"{name}.*" for name in self.blocks)


def generic(transformer: str, lists: str, archs: str = "", one_row: str = "", **facts: Any) -> Family:
    """A family in the generic flow; patterns of its lists, archs and linears on one row are words."""
    blocks = tuple(map(BlockList, lists.split()))
    return Family(transformer, blocks, tuple(archs.split()), tuple(one_row.split()), **facts)


def own_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """A part's config without the entries that say how its file was written."""
    written = ("architectures", "model_type", "torch_dtype", "transformers_version")
    return {key: value for key, value in config.items() if not key.startswith("_") and key not in written}


def published(name: str) -> dict[str, dict[str, Any]]:
    """The config of each part of a model, as published, from the file of that name; classes' defaults are left out."""
    text = Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8")
    configs: dict[str, dict[str, Any]] = json.loads(text)
    return configs
