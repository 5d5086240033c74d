"""One training step under a `coat:` block written as YAML, and what can be read from its tensors afterwards."""

import functools
import weakref
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from coat_core.activation import _Keeper
from coat_core.linear.function import load_weight
from coat_flux.blocks.apply import apply_coat
from coat_flux.config.coat import COATConfig
from coat_flux.trainers.optimizer import build_optimizer
from coat_flux.trainers.standalone.network import lora_parameters
from tests.helpers.flux import loss_of, predict, tiny_flux, tiny_lora
from tests.helpers.operators import OperatorLog
from tests.helpers.saved_tensors import SavedTensors, recording, recording_fused

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYER = "transformer.transformer_blocks.0.attn.to_k"


class GemmLog(OperatorLog):
    """(dtype of a, shape of its scale) of every FP8 or INT8 GEMM."""

    def __init__(self) -> None:
        super().__init__(self._record)
        self.calls: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        if func in (torch.ops.coat.fp8_mm.default, torch.ops.coat.int8_mm.default):
            self.calls.append((args[0].dtype, tuple(args[1].shape)))


class Run:
    """A step of the tiny FLUX with LoRA, in the generic flow unless the YAML `text` of the coat block says otherwise.

    `kept` has what the fused flow kept, as (name, tensors).
    """

    def __init__(self, text: str) -> None:
        block = yaml.safe_load(text)
        block["activation"] = {"flow": "generic"} | block.get("activation", {})
        self.fused = block["activation"]["flow"] == "fused"
        config = COATConfig.from_dict(block)
        self.model = tiny_flux()
        for blocks in (self.model.transformer_blocks, self.model.single_transformer_blocks):
            del blocks[1:]
        self.report = apply_coat(self.model, config)
        tiny_lora(self.model, config)
        self.lora = lora_parameters(self.model)
        self.optimizer = build_optimizer(list(self.lora.values()), 1e-3, config)
        self.layer = self.model.transformer_blocks[0].attn.to_k.base_layer
        self.block_calls, self.block_inputs = 0, []
        if not self.fused:  # a block with hooks is not fused
            for block in self._blocks():
                block.register_forward_pre_hook(self._see_block, with_kwargs=True)
                block.attn.register_forward_pre_hook(self._see_run)  # a block recomputes without its own hooks
        if self.fused:
            predict(self.model)  # a process checks each class of blocks once, which keeps tensors of its own
        torch.manual_seed(0)
        self._step()

    def _blocks(self) -> list[nn.Module]:
        return [*self.model.transformer_blocks, *self.model.single_transformer_blocks]

    def _see_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.block_inputs.append(weakref.ref(hidden.untyped_storage()))

    def _see_run(self, *_: Any) -> None:
        self.block_calls += 1

    def _step(self) -> None:
        self.forward_gemms, self.backward_gemms = GemmLog(), GemmLog()
        keepers, keep = weakref.WeakSet(), _Keeper.__init__

        def recorded(keeper: _Keeper, *args: Any) -> None:
            keep(keeper, *args)
            keepers.add(keeper)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Keeper, "__init__", recorded)
            with recording() as self.saved, recording_fused() as self.kept, self.forward_gemms:
                loss = loss_of(predict(self.model))
        self.saved_for_layer = _adapter_input(self.saved, self.lora[f"{LAYER}.lora_A.weight"])
        # the first block's input requires no gradient: all hold it, no one stores it
        self.inputs_alive = [ref() is not None for ref in self.block_inputs[1:]]
        self.kept_inputs = {keeper._quantized.codes.dtype for keeper in keepers}
        with self.backward_gemms:
            loss.backward()
        self.gradients = {name: param.grad.clone() for name, param in self.lora.items()}
        self.optimizer.step()

    def fused_tensors(self) -> list[tuple[str, tuple[Tensor, ...]]]:
        """(name, tensors) of the token-sized tensors the fused flow keeps."""
        named = ("x", "mlp", "result", "qkv", "out")
        kept = [(name.split("_")[-1].rstrip("01"), tensors) for name, tensors in self.kept]
        return [(kind, tensors) for kind, tensors in kept if tensors and kind in named]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the codes that the converted layer reads in both passes; two of NVFP4 are a byte."""
        return load_weight(self.layer, self.layer.config).codes.dtype

    @property
    def float_weights(self) -> int:
        """Bytes of high precision weights in the converted blocks, adapters and biases apart."""
        return sum(
            p.numel() * p.element_size()
            for block in self._blocks()
            for name, p in block.named_parameters()
            if p.ndim == 2 and "lora_" not in name
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """Optimizer state of one adapter's B, [64, 4]."""
        return self.optimizer.state[self.lora[f"{LAYER}.lora_B.weight"]]


def _adapter_input(saved: SavedTensors, weight: Tensor) -> tuple[Tensor, ...]:
    """(codes, scale) saved beside this down projection for its gradient; empty where it saved no FP8."""
    for i, one in enumerate(saved.tensors):
        if weight.untyped_storage().data_ptr() in one.storages and i >= 2 and saved.tensors[i - 2].dtype in FP8:
            return saved.alive[i - 2][0], saved.alive[i - 1][0]
    return ()


@functools.cache
def run(text: str) -> Run:
    """Make a step once for all tests that read it."""
    return Run(text)
