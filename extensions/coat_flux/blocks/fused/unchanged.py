"""Whether a block is still as it was read: one pass over what its modules hold, whatever that means to a reader.

Reading all blocks of FLUX.1-dev takes about 30 ms, this pass a sixth of it, for what it looks at is in no cache any
more. It looks at more than readers do, so that it need not follow them; what changes nothing for a reader costs one
more reading.

    modules        those of the block, and ai-toolkit's LoRA modules on its linears
    of each        class, hooks (once torch has registered any), children, parameters; buffers, training mode and all
                   attributes of its own with what is in lists and dictionaries, but for the linears inside an adapter,
                   of which readers take the weight
    of a tensor    which one it is, and outside of adapters where its data is and whether it requires a gradient
    outside        strengths and switches of ai-toolkit's networks

Values that are changed in place are no change: who read the block has the same tensors. Buffers are held weakly, so
that nothing here keeps the FP8 codes of a model on the GPU when it moves to the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ADAPTER_LINEARS = ("lora_A.", "lora_B.", "lora_down", "lora_up")
NEVER_CALLED = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict)
_STANDARD = set(vars(nn.Module())) - {"training"}
_requires_grad = attrgetter("requires_grad")


class Unchanged:
    """What a block and the adapters on it were when this was made.

    Args:
        block: with or without LoRA.
        on_lost: called when one of its buffers was replaced and freed.
    """

    def __init__(self, block: nn.Module, on_lost: Callable[[], None]) -> None:
        named = list(_modules(block))
        called = [(name, module) for name, module in named if type(module) not in NEVER_CALLED]
        self._called = [module for _, module in called]
        outer = [module for name, module in called if not any(part in name for part in ADAPTER_LINEARS)]
        self._dicts = [vars(module) for module in outer if type(module) is not nn.Identity]
        keys = [[key for key in found if key not in _STANDARD] for found in self._dicts]
        self._own = [(itemgetter(*some, some[0]), found) for found, some in zip(self._dicts, keys, strict=True)]
        own = [found[key] for found, some in zip(self._dicts, keys, strict=True) for key in some]
        found = (_network_of(module) for module in outer)
        self._networks = list({id(network): network for network in found if network is not None}.values())

        containers = [vars(module)["_parameters"] for module in self._called]
        containers += [module._modules for _, module in named]
        containers += [value for value in own if isinstance(value, dict | list | set)]
        containers += [vars(each["processor"]) for each in self._dicts if "processor" in each]
        held = [each[key] for each in self._dicts for key in ("_parameters", "_buffers")]
        hooks = [vars(module)[key] for module in self._called for key in HOOKS]
        containers += [each for each in hooks if each]
        self._hooks = [each for each in hooks if not each]
        self._hooked = RemovableHandle.next_id
        self._empty = [each for each in (*containers, *held) if not each]
        ids = set(map(id, held))
        self._containers = [each for each in containers if each and id(each) not in ids]
        self._contents = [each.copy() for each in self._containers]
        self._held = [each for each in held if each]
        tensors = [x for each in self._held for x in each.values() if x is not None]
        self._parameters = [x for x in tensors if isinstance(x, nn.Parameter)]
        self._weak = [weakref.ref(x, lambda _: on_lost()) for x in tensors if not isinstance(x, nn.Parameter)]
        plain = all(type(x) in (Tensor, nn.Parameter) for x in tensors)  # others have no address
        self._buffers = [each["_buffers"] for each in self._dicts if each["_buffers"]] if plain else []
        self._placed = self._parameters if plain else []
        self._before = self._facts()

    def holds(self) -> bool:
        """Whether all is as it was."""
        if any(self._empty):
            return False
        if self._hooked != RemovableHandle.next_id:  # torch counts the hooks that anything was ever given
            if any(self._hooks):
                return False
            self._hooked = RemovableHandle.next_id
        try:
            return self._containers == self._contents and self._facts() == self._before
        except (KeyError, RuntimeError, TypeError):  # an attribute or a buffer is gone; tensors have no truth value
            return False

    def _facts(self) -> list[Any]:
        return [
            *map(type, self._called),
            *map(len, self._dicts),
            *[get(found) for get, found in self._own],
            *map(id, chain.from_iterable(map(dict.values, self._held))),
            *map(Tensor.data_ptr, chain.from_iterable(map(dict.values, self._buffers))),
            *map(Tensor.data_ptr, self._placed),
            *map(_requires_grad, self._parameters),
            *map(_state_of, self._networks),
        ]


def _modules(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of the block and of ai-toolkit's LoRAs on it, which are no part of it."""
    for name, module in block.named_modules():
        yield name, module
        owner = getattr(vars(module).get("forward"), "__self__", None)
        while hasattr(owner, "lora_down") and hasattr(owner, "org_forward"):
            yield from owner.named_modules()
            owner = getattr(owner.org_forward, "__self__", None)


def _network_of(module: Any) -> Any:
    """ai-toolkit's network of one of its LoRA modules; None of other modules."""
    return module.network_ref() if "network_ref" in vars(module) else None


def _state_of(network: Any) -> tuple[Any, ...]:
    strengths = network._multiplier
    entries = tuple(strengths) if isinstance(strengths, list) else strengths
    switches = (network.is_active, network.is_merged_in, network.is_lorm)
    return *switches, entries, id(getattr(network, "torch_multiplier", None))
