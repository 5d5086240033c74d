"""Takes over the call of each block, whatever model it is in and however that model would recompute it.

A block's `forward` is replaced on the instance, so that a call reaches the runner from diffusers' models, ai-toolkit's
own and any other, by position or by keyword. Two checkpoints around one block would displace each other's hooks on
saved tensors: what a model does by itself is switched off, and stays off when its trainer asks for it again later.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from coat_core.activation.packing import checkpoint_records

logger = logging.getLogger(__name__)

SWITCHES = ("enable_gradient_checkpointing", "gradient_checkpointing_enable")
FLAG = "gradient_checkpointing"
# what compiles the frames that are called now: something inside a compiled module, None or False elsewhere
_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


class BlockHook:
    """Stands in place of a block's forward: while gradients are recorded, `run` is called instead.

    Args:
        run: called as `run(block, *args, **kwargs)`; its arguments are by position as far as forward names them.
        on_host: called with the block where a checkpoint of the model's own is around the call: it runs as it is.
        ready: called with the block before it runs, also where no gradients are recorded.

    Attributes:
        before: a forward of the instance that was there; None where it was the class's.
    """

    def __init__(
        self,
        block: nn.Module,
        run: Callable[..., Any],
        on_host: Callable[[nn.Module], None] = lambda _: None,
        ready: Callable[[nn.Module], None] | None = None,
    ):
        self.before = vars(block).get("forward")
        self.run, self._block, self._on_host, self._ready = run, block, on_host, ready
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(block.forward).parameters.values()
        self._named = [(each.name, each.default) for each in parameters if each.kind in places]

    @property
    def own(self) -> Callable[..., Any]:
        """The forward that was there."""
        return self.before or type(self._block).forward.__get__(self._block)  # type: ignore[attr-defined, no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        compiling = torch.compiler.is_dynamo_compiling() or _compiler()
        if compiling and (torch.is_grad_enabled() or self._ready is not None):
            # the host has compiled the block around us: a runner decides by what it is given, which none can trace
            return torch.compiler.disable(self._call)(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._ready is not None:
            self._ready(self._block)
        if not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        if checkpoint_records():
            self._on_host(self._block)
            return self.own(*args, **kwargs)
        for name, default in self._named[len(args) :]:
            if not kwargs or (name not in kwargs and default is inspect.Parameter.empty):
                break
            args += (kwargs.pop(name, default),)
        return self.run(self._block, *args, **kwargs)


def take_over(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    run: Callable[..., Any],
    on_host: Callable[[nn.Module], None],
    ready: Callable[[nn.Module], None] | None = None,
) -> None:
    """Put a hook on each block, in place of all that are there, and switch the model's own recomputation off."""
    for module in model.modules():
        release(module)
    for block in blocks:
        block.forward = BlockHook(block, run, on_host, ready)  # type: ignore[method-assign]
    for module in model.modules():
        if getattr(module, FLAG, False):
            setattr(module, FLAG, False)
        for name in SWITCHES:
            if hasattr(module, name):
                setattr(module, name, _stay_off)


def release(block: nn.Module) -> None:
    """Give a block its own forward back."""
    hook = hook_of(block)
    if hook is not None:
        del block.forward
        if hook.before is not None:
            block.forward = hook.before  # type: ignore[method-assign]


def hook_of(block: nn.Module) -> BlockHook | None:
    """The hook on a block; None where there is none."""
    found = vars(block).get("forward")
    return found if isinstance(found, BlockHook) else None


def is_replaced(block: nn.Module) -> bool:
    """Whether someone else has put another forward in place of the class's."""
    hook = hook_of(block)
    return "forward" in vars(block) if hook is None else hook.before is not None


def own_forward(block: nn.Module) -> Callable[..., Any]:
    """What runs the block as it is: its own forward under the hook, else the block."""
    hook = hook_of(block)
    return block if hook is None else hook.own


def _stay_off(*_: Any, **__: Any) -> None:
    """In place of a model's switch for its own recomputation, which a trainer may turn again."""


def check_reached(names: Sequence[str], ran: Mapping[int, str], *, strict: bool) -> None:
    """After a step: warn of what it did not bring to the runner.

    Whole lists may belong to a part of the model that other steps use, as Wan 2.2's second transformer.

    Args:
        ran: index → how it ran, as `BlockRunner.ran`.
        strict: refuse what is left out of a list of which some blocks were brought.

    Raises:
        RuntimeError: no block was brought to it; or as `strict` has it.
    """
    lists: dict[str, list[str | None]] = {}
    for i, name in enumerate(names):
        lists.setdefault(name.rpartition(".")[0], []).append(ran.get(i))
    found, partly, reached = [], False, 0
    for name, ways in lists.items():
        idle, host = ways.count(None), ways.count("host")
        found += [f"{idle} of {len(ways)} {name} were not called"] * bool(idle)
        found += [f"{host} of {len(ways)} {name} are in a checkpoint of the model's own"] * bool(host)
        partly = partly or bool(host) or 0 < idle < len(ways)
        reached += len(ways) - idle - host
    text = "the first step left COAT out of blocks, whose activations stay in high precision: " + ", ".join(found)
    if found and (not reached or (partly and strict)):
        raise RuntimeError(f"{text}; set coat.enabled: false, or report this model's class")
    if found:
        logger.warning("%s", text)


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    """The first of a block's arguments that is a tensor: hidden states."""
    return next((x for x in args if isinstance(x, Tensor)), torch.empty(0))


def frozen_tensors(block: nn.Module, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Parameters and buffers of the block, and constants given to it that all blocks share (rotary tables)."""
    yield from block.parameters()
    yield from block.buffers()
    yield from (x for x in tree_iter(args) if isinstance(x, Tensor) and not x.requires_grad)
