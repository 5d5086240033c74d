"""The models COAT knows, one file per family; and which of them a model, a block or a linear belongs to.

Of an unknown class the outermost block lists are converted and take the generic flow.

To add a model: a file like `zimage.py`, or without a reader a row in `others.tsv`; an entry in `ALL`; its
small model in the tests; a row in docs/models.md.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...config.findings import ConfigError
from ...config.job_sections import NetworkSection
from ..hook import argument_names
from .chroma import CHROMA, CHROMA_OF_TOOLKIT
from .family import BlockList, Family, Rates, generic
from .flux1 import FLUX
from .flux2 import FLUX2, FLUX2_OF_TOOLKIT
from .krea2 import KREA2, KREA2_OF_TOOLKIT
from .others import GENERIC, OTHER_PIPELINES, REFUSED
from .qwen_image import QWEN_IMAGE
from .sd3 import SD3
from .zimage import Z_IMAGE

__all__ = ["ARCHS", "FAMILIES", "FLUX", "FLUX2", "HUB_MODELS", "PIPELINES", "RATES", "REFUSED", "BlockList", "Family"]

ALL = (FLUX, FLUX2, FLUX2_OF_TOOLKIT, CHROMA, CHROMA_OF_TOOLKIT, QWEN_IMAGE, Z_IMAGE, SD3, KREA2, KREA2_OF_TOOLKIT)
ALL += GENERIC
# class of the transformer → what is known of it
FAMILIES: dict[str, Family] = {family.transformer: family for family in ALL}
# `model.arch` of ai-toolkit → its family; others are refused, or of another ai-toolkit or a user's extension
ARCHS: dict[str, Family] = {}
# a pipeline's class in model_index.json → the archs that it is trained as
PIPELINES: dict[str, tuple[str, ...]] = dict(OTHER_PIPELINES)
# a model's name on the hub → configs of its parts
HUB_MODELS: dict[str, dict[str, dict[str, Any]]] = {}
# class of a block → bytes that it keeps in the generic flow
RATES: dict[str, Rates] = {}
# class of a block → its lists that have a reader
READ_BLOCKS: dict[str, list[BlockList]] = {}
for _family in ALL:
    ARCHS.update(dict.fromkeys(_family.archs, _family))
    PIPELINES.update(_family.pipelines)
    HUB_MODELS.update(_family.models)
    RATES.update(_family.rates)
    for _list in _family.lists:
        for _reader in (_list.reader, *_list.earlier):
            if _reader is not None:
                READ_BLOCKS.setdefault(_list.block, []).append(replace(_list, reader=_reader))

KEY_PREFIX = "transformer."  # of saved LoRA names, and of the names that words are matched against
# in names of parameters, of PEFT and of ai-toolkit
MATRICES = (".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.", ".lokr_w")


# --- a model ---


def family_of(model: nn.Module) -> Family:
    """The family of a model's class, or one of its outermost lists; ValueError without any block list."""
    for cls in type(model).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    name = type(model).__name__
    lists = []
    for list_name, items in model.named_modules():
        if isinstance(items, nn.ModuleList) and any(isinstance(module, nn.Linear) for module in items.modules()):
            lists.append(list_name)
    if not lists:
        nearest = ", ".join(difflib.get_close_matches(name, FAMILIES, cutoff=0))
        raise ValueError(
            f"{name}: this class is not known and has no list of blocks to convert; give a model of a known class "
            f"(the nearest are {nearest}; docs/models.md has all)"
        )
    depth = min(list_name.count(".") for list_name in lists)
    return generic(name, " ".join(list_name for list_name in lists if list_name.count(".") == depth))


def listed_blocks(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Full name → block, in forward order, from the matching module lists; ValueError if none matches."""
    lists = {name: items for name, items in model.named_modules() if isinstance(items, nn.ModuleList)}
    blocks: dict[str, nn.Module] = {}
    for pattern in patterns:
        for name, items in lists.items():
            if fnmatchcase(name, pattern):
                blocks.update({f"{name}.{i}": block for i, block in enumerate(items)})
    if not blocks:
        raise ValueError(
            f"{type(model).__name__}: has none of the block lists its entry names ({', '.join(patterns)}); "
            "use a diffusers version that has them, or change its file in coat_flux.blocks.models"
        )
    return blocks


# --- a block ---


@functools.cache
def read_list(kind: type[nn.Module]) -> BlockList | None:
    """The entry of a block class that has a reader, else None. Arguments must match as well."""
    known = READ_BLOCKS.get(kind.__name__, [])
    of_diffusers = kind.__module__.startswith("diffusers.")
    for each in known:
        if takes_arguments_of(each, kind) and (of_diffusers or each.reader not in each.earlier):
            return each
    return known[0] if known and of_diffusers else None


def first_measured(blocks: Sequence[nn.Module]) -> int:
    """Index of the first block that GEMMs and attention are measured on: one of the text alone is small."""
    for i, block in enumerate(blocks):
        known = read_list(type(block))
        if known is None or known.reader is None or not known.reader.of_text:
            return i
    return 0


def takes_arguments_of(known: BlockList, kind: type[nn.Module]) -> bool:
    """Whether the reader of this entry reads the arguments of a block's class."""
    return known.reader is not None and known.reader.arguments == argument_names(kind)


def block_name(kind: type[nn.Module]) -> str:
    """The name of a block's class, which is none of `READ_BLOCKS` where it has no reader."""
    name = kind.__name__
    if name in READ_BLOCKS and read_list(kind) is None:
        return f"{kind.__module__.rpartition('.')[2]}.{name}"
    return name


# --- linears and parameters by name ---


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether the full name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def layer_of(parameter: str) -> str:
    """Full name of the linear that a LoRA parameter of either trainer belongs to; other names come back unchanged."""
    name = parameter.replace("$$", ".")
    for mark in MATRICES:
        name = name.partition(mark)[0]
    return name.removeprefix(KEY_PREFIX)


def target_names(names: Iterable[str], network: NetworkSection, inside: Sequence[str] = FLUX.convert) -> list[str]:
    """Those of the linears' full names that get an adapter, in their order; by default those `inside` the blocks."""
    words = network.network_kwargs
    chosen = []
    for name in names:
        key = KEY_PREFIX + name
        if network.transformer_only and not matches(name, inside):
            continue
        if any(word in key for word in words.ignore_if_contains):
            continue
        spellings = (key, key.replace(".", "$$"))
        only = words.only_if_contains
        if only is None or any(word in each for word in only for each in spellings):
            chosen.append(name)
    return chosen


def trained_names(parameters: Iterable[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Names of the parameters that full fine-tuning trains, in order.

    `include` and `exclude` are fnmatch patterns over names of parameters and their modules. ConfigError if a pattern
    matches nothing, or nothing is left to train.
    """

    def is_meant(name: str, patterns: Sequence[str]) -> bool:
        return matches(name, patterns) or matches(name.rpartition(".")[0], patterns)

    names = list(parameters)
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(is_meant(name, (pattern,)) for name in names):
                raise ConfigError(
                    f"coat.{key}: {pattern!r} matches no parameter of the transformer; patterns are matched against "
                    f"full names such as {names[-1]!r}"
                )
    chosen = [name for name in names if is_meant(name, include) and not is_meant(name, exclude)]
    if not chosen:
        raise ConfigError("coat.include, coat.exclude: nothing of the transformer is left to train; exclude less")
    return chosen
