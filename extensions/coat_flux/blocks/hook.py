"""Takes over each block's call in any model, whatever recomputation the model does itself.

`forward` is replaced on the instance, so calls from diffusers, ai-toolkit and others arrive by position or
keyword. Two checkpoints around one block would displace each other's saved-tensor hooks, so the model's own is off.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.autograd import checkpoint_records

SWITCHES = ("enable_gradient_checkpointing", "gradient_checkpointing_enable")  # methods of models
FLAG = "gradient_checkpointing"
# returns what compiles the functions called now; None or False outside a compiled module
_frame_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


@functools.cache
def argument_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Argument names of the class's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class BlockHook:
    """Replaces a block's forward: while gradients are recorded, `run(block, *args, **kwargs)` is called instead."""

    def __init__(
        self,
        block: nn.Module,
        run: Callable[..., Any],  # receives arguments by position as far as forward names them
        checkpointed: Callable[[nn.Module], None],  # called with a block in a checkpoint, which runs it unchanged
        ready: Callable[[nn.Module], None] | None,  # called with the block before it runs, also without gradients
    ):
        self.before = vars(block).get("forward")  # None: the class's
        self.run, self._block, self._checkpointed, self._ready = run, block, checkpointed, ready
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(block.forward).parameters.values()
        self._positional = [(each.name, each.default) for each in parameters if each.kind in positional]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        compiling = torch.compiler.is_dynamo_compiling() or _frame_compiler()
        if compiling and (torch.is_grad_enabled() or self._ready is not None):
            # the trainer has compiled the block around us: a runner's decisions cannot be traced
            return torch.compiler.disable(self)(*args, **kwargs)
        if self._ready is not None:
            self._ready(self._block)
        if not torch.is_grad_enabled():
            return self.own()(*args, **kwargs)
        if checkpoint_records():
            self._checkpointed(self._block)
            return self.own()(*args, **kwargs)
        for name, default in self._positional[len(args) :]:  # keywords become positional
            if not kwargs or (name not in kwargs and default is inspect.Parameter.empty):
                break
            args += (kwargs.pop(name, default),)
        return self.run(self._block, *args, **kwargs)

    def own(self) -> Callable[..., Any]:
        """The forward under this hook, whatever has been wrapped around it since."""
        return self.before or type(self._block).forward.__get__(self._block)  # FSDP2 changes the block's class


def take_over(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    run: Callable[..., Any],
    checkpointed: Callable[[nn.Module], None],
    ready: Callable[[nn.Module], None] | None = None,
) -> None:
    """Hook these blocks and no others, and switch the model's own recomputation off."""
    for module in model.modules():
        release(module)
    for block in blocks:
        block.forward = BlockHook(block, run, checkpointed, ready)  # type: ignore[method-assign]
    for module in model.modules():
        if getattr(module, FLAG, False):
            setattr(module, FLAG, False)
        for name in SWITCHES:  # a trainer may call them later
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
    forward = vars(block).get("forward")
    return forward if isinstance(forward, BlockHook) else None


def own_forward(block: nn.Module) -> Callable[..., Any]:
    """The block's own forward under the hook; its class's where something has been wrapped around the hook."""
    hook = hook_of(block)
    return type(block).forward.__get__(block) if hook is None else hook.own()


def has_hooks(module: nn.Module) -> bool:
    """Whether torch's hooks are registered on the module."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    """A block's hidden states: the first argument that is a tensor."""
    return next((x for x in args if isinstance(x, Tensor)), torch.empty(0))
