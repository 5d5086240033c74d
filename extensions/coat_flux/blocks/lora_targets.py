"""Which linears of a FLUX transformer get an adapter, by name, as ai-toolkit chooses them.

Words are matched as ai-toolkit does: as substrings of `transformer.<full name>`; `only_if_contains` also of that name
with `$$` for each dot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks")
KEY_PREFIX = "transformer."  # of saved LoRA names, and of the names that words are matched against
MATRICES = (".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.")  # in names of parameters, of PEFT and of ai-toolkit


def layer_of(parameter: str) -> str:
    """Full name of the linear that a LoRA parameter of either host belongs to; other names come back as they are."""
    name = parameter.replace("$$", ".")
    for mark in MATRICES:
        name = name.partition(mark)[0]
    return name.removeprefix(KEY_PREFIX)


def target_names(
    names: Iterable[str],
    *,
    only_if_contains: Sequence[str] | None = None,
    ignore_if_contains: Sequence[str] | None = None,
    transformer_only: bool = True,
) -> list[str]:
    """Return those of the linears' full names that get an adapter, in their order.

    Args:
        names: of all linears.
        only_if_contains: keep names with at least one of these; None keeps all.
        ignore_if_contains: drop names with any of these.
        transformer_only: only linears inside the block lists.
    """
    inside = [name for name in names if not transformer_only or name.split(".")[0] in BLOCK_LISTS]
    return [name for name in inside if _is_chosen(KEY_PREFIX + name, only_if_contains, ignore_if_contains)]


def _is_chosen(name: str, only: Sequence[str] | None, ignore: Sequence[str] | None) -> bool:
    if any(word in name for word in ignore or ()):
        return False
    if only is None:
        return True
    return any(word in name or word in name.replace(".", "$$") for word in only)
