"""Takes over each block's call in any model, whatever recomputation the model does itself.

`forward` is replaced on the instance, so calls from diffusers, ai-toolkit and others arrive by position or
keyword. Two checkpoints around one block would displace each other's saved-tensor hooks, so the model's own is
switched off for good.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from coat_core.autograd import checkpoint_records

logger = logging.getLogger(__name__)

SWITCHES = ("enable_gradient_checkpointing", "gradient_checkpointing_enable")
FLAG = "gradient_checkpointing"
# what compiles the frames that are called now: something inside a compiled module, None or False elsewhere
_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


@functools.cache
def argument_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Argument names of the class's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class BlockHook:
    """Replaces a block's forward: while gradients are recorded, `run(block, *args, **kwargs)` is called instead.

    Args:
        run: receives arguments by position as far as forward names them.
        on_host: called with a block inside a checkpoint of its model, which then runs unchanged.
        ready: called with the block before it runs, also without gradients.
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
        """The forward that was there; FSDP2 changes the block's class."""
        return self.before or type(self._block).forward.__get__(self._block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        compiling = torch.compiler.is_dynamo_compiling() or _compiler()
        if compiling and (torch.is_grad_enabled() or self._ready is not None):
            # the host has compiled the block around us: a runner decides by what it is given, which none can trace
            return torch.compiler.disable(self)(*args, **kwargs)
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
        for name in SWITCHES:  # a trainer may turn them again
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: None)


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


def own_forward(block: nn.Module) -> Callable[..., Any]:
    """The block's own forward under the hook, else the block."""
    hook = hook_of(block)
    return block if hook is None else hook.own


def check_reached(names: Sequence[str], ran: Mapping[int, str], *, strict: bool) -> None:
    """After the first step, warn of blocks that the runner did not get (`ran`: as in `BlockRunner`).

    A whole list may belong to another part of the model, such as Wan 2.2's second transformer.

    Raises:
        RuntimeError: no block arrived, or with `strict` only some of a list.
    """
    lists: dict[str, list[str | None]] = {}
    for i, name in enumerate(names):
        lists.setdefault(name.rpartition(".")[0], []).append(ran.get(i))
    missed, partly, reached = [], False, 0
    for name, ways in lists.items():
        idle, host = ways.count(None), ways.count("host")
        if idle:
            missed.append(f"{idle} of {len(ways)} {name} were not called")
        if host:
            missed.append(f"{host} of {len(ways)} {name} are in a checkpoint of the model's own")
        partly = partly or bool(host) or 0 < idle < len(ways)
        reached += len(ways) - idle - host
    text = "the first step left COAT out of blocks, whose activations stay in high precision: " + ", ".join(missed)
    if missed and (not reached or (partly and strict)):
        raise RuntimeError(f"{text}; set coat.enabled: false, or report this model's class")
    if missed:
        logger.warning("%s", text)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    """The first of a block's arguments that is a tensor: hidden states."""
    return next((x for x in args if isinstance(x, Tensor)), torch.empty(0))


def frozen_tensors(block: nn.Module, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Parameters and buffers of the block, and constants given to it that all blocks share (rotary tables)."""
    yield from block.parameters()
    yield from block.buffers()
    yield from (x for x in tree_iter(args) if isinstance(x, Tensor) and not x.requires_grad)
