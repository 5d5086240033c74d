"""FP8AdamW: torch.optim.AdamW with its moments stored in FP8.

Each step dequantizes both moments, does the AdamW update in fp32 (`rule`) and quantizes them again, on packed buffers
(`packing`) so that launches and host syncs do not grow with the number of parameters. What is stored: `state`; what a
state file may contain: `loading`.
Source: arXiv 2410.19313, section 3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from coat_core.config import FP8QuantizationConfig
from coat_core.optim.loading import TORCH_ONLY_OPTIONS, adopt_group, check_groups, restored_states
from coat_core.optim.packing import Layout, chunk_elements, chunked, spans
from coat_core.optim.rule import Hyper, adamw_update_
from coat_core.optim.state import MOMENTS, State, Storage, flat_state, read_moment, storages, write_moment, zero_state
from coat_core.quantize import stochastic_cast

logger = logging.getLogger(__name__)

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Piece(NamedTuple):
    """A flat span of one parameter with its gradient and the matching part of its state."""

    param: Tensor
    grad: Tensor
    state: State


def _where(group_index: int, index: int, param: Tensor) -> str:
    return f"param_groups[{group_index}]['params'][{index}] of shape {tuple(param.shape)}"


def _check_torch_options(options: dict[str, Any]) -> None:
    """Accept torch.optim.AdamW's other options while they are off; refuse them by name when they are on."""
    for name, value in options.items():
        if name not in TORCH_ONLY_OPTIONS:
            raise TypeError(f"{name}={value!r}: FP8AdamW has no such option; see torch.optim.AdamW and fp8_config")
        if value:
            raise ValueError(f"{name}={value!r}: not supported by FP8AdamW; leave it out or use torch.optim.AdamW")


def _check_hyper(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr of shape {tuple(lr.shape)}: a tensor lr must have one element")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name}={group[name]!r}: must be 0 or more")
    if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']!r}: must be two numbers from 0 to below 1")


def _pieces(param: Tensor, flat_param: Tensor, state: State, limit: int, block_size: int) -> list[_Piece]:
    """Cut one parameter at block borders into pieces of at most `limit` elements."""
    assert param.grad is not None
    whole = _Piece(flat_param, param.grad.reshape(-1), flat_state(state))
    if param.numel() <= limit:
        return [whole]
    pieces = []
    for start, stop in spans(param.numel(), limit):
        blocks = slice(start // block_size, -(-stop // block_size))
        part = {k: v[start:stop] if k in MOMENTS else v[blocks] for k, v in whole.state.items() if k != "step"}
        pieces.append(_Piece(whole.param[start:stop], whole.grad[start:stop], part))
    return pieces


class FP8AdamW(torch.optim.Optimizer):
    """AdamW with exp_avg and exp_avg_sq stored as FP8 codes; drop-in for torch.optim.AdamW.

    w ← (1 − lr·λ)·w − lr·m̂/(sqrt(v̂) + ε), with m and v dequantized before and quantized after each step. The math is
    in fp32 for parameters of any precision; bf16 and fp16 parameters are rounded once per step, to nearest or
    stochastically (`fp8_config.stochastic_rounding`, which draws from torch's global generator of the device).

    Args:
        params: parameters or param groups as in torch.optim; fp32, bf16 or fp16. `fp8_config` is the same for all.
        lr: learning rate, a float or a one-element tensor.
        betas: decay of exp_avg and exp_avg_sq.
        eps: added to sqrt(v̂).
        weight_decay: decoupled weight decay λ.
        maximize: ascend instead of descend.
        fp8_config: how the moments are stored; None is `FP8QuantizationConfig()`.
        torch_options: torch.optim.AdamW's amsgrad, foreach, capturable, differentiable, fused; only False or None.

    Raises:
        ValueError: a hyper-parameter outside its range, a torch option that is on, an empty parameter list, or a
            parameter that is not fp32, bf16 or fp16.

    Numerics: with both moments unquantized, fp32 parameters are bit-equal to torch.optim.AdamW(foreach=False) and bf16
        ones equal its fp32 result rounded to nearest. With expansion no nonzero exp_avg_sq comes back as zero.
    Source: arXiv 2410.19313, section 3; state layout in `coat_core.optim.state`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        fp8_config: FP8QuantizationConfig | None = None,
        **torch_options: Any,
    ) -> None:
        _check_torch_options(torch_options)
        self.fp8_config = fp8_config or FP8QuantizationConfig()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "fp8": asdict(self.fp8_config),
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fp8_config": self.fp8_config}

    def _storages(self) -> dict[str, Storage]:
        return storages(self.fp8_config)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as torch.optim does, refusing values and parameters FP8AdamW cannot use.

        Raises:
            ValueError: see the class; the group is not added.
        """
        if param_group.get("fp8", self.defaults["fp8"]) != self.defaults["fp8"]:
            raise ValueError("param group has its own 'fp8': it is the same for all groups; pass fp8_config instead")
        _check_torch_options({k: v for k, v in param_group.items() if k in TORCH_ONLY_OPTIONS})
        _check_hyper({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group_index = len(self.param_groups) - 1
        for index, param in enumerate(self.param_groups[-1]["params"]):
            if param.dtype not in PARAM_DTYPES:
                del self.param_groups[-1]
                raise ValueError(
                    f"{_where(group_index, index, param)} has dtype {param.dtype}: FP8AdamW needs float32, bfloat16 "
                    "or float16; convert it or use torch.optim.AdamW"
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one optimization step on every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient is sparse; nothing has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for group in self.param_groups:
            lr = group["lr"].detach().cpu() if isinstance(group["lr"], Tensor) else group["lr"]
            for (device, dtype, step), params in self._buckets(group).items():
                hyper = Hyper(
                    step=step,
                    lr=lr,
                    beta1=float(group["betas"][0]),
                    beta2=float(group["betas"][1]),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    maximize=group["maximize"],
                )
                self._update(params, device, dtype, hyper)
        return loss

    def _check_gradients(self) -> None:
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is not None and param.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"{_where(group_index, index, param)} has a sparse gradient: FP8AdamW needs dense gradients; "
                        "make the layer with sparse=False or use torch.optim.SparseAdam for this parameter"
                    )

    def _buckets(self, group: dict[str, Any]) -> dict[tuple[torch.device, torch.dtype, float], list[Tensor]]:
        """Count the step of every parameter with a gradient and sort them by (device, dtype, step).

        The counters are tensors on the CPU, read all at once: no device sync, and one read whatever their number.
        """
        params = [param for param in group["params"] if param.grad is not None]
        moments = self._storages()
        for param in params:
            if not self.state[param]:
                self.state[param] = zero_state(param, moments)
        if not params:
            return {}
        counters = [self.state[param]["step"] for param in params]
        torch._foreach_add_(counters, 1.0)
        buckets: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
        for param, step in zip(params, torch.stack(counters).tolist(), strict=True):
            buckets.setdefault((param.device, param.dtype, step), []).append(param)
        return buckets

    def _update(self, params: list[Tensor], device: torch.device, dtype: torch.dtype, hyper: Hyper) -> None:
        """Step parameters of one device, dtype and step number, one packed buffer at a time."""
        block_size = self.fp8_config.block_size
        limit = max(chunk_elements(device) // block_size, 1) * block_size
        # A non-contiguous parameter is updated in a flat copy and written back.
        flat_params = [param.detach().reshape(-1) for param in params]
        pieces = [
            piece
            for param, flat_param in zip(params, flat_params, strict=True)
            for piece in _pieces(param, flat_param, self.state[param], limit, block_size)
        ]
        for part in chunked([piece.param.numel() for piece in pieces], limit):
            self._update_pieces(pieces[part], dtype, hyper)
        for param, flat_param in zip(params, flat_params, strict=True):
            if not param.is_contiguous():
                param.copy_(flat_param.view(param.shape))

    def _update_pieces(self, pieces: list[_Piece], dtype: torch.dtype, hyper: Hyper) -> None:
        layout = Layout([piece.param.numel() for piece in pieces], self.fp8_config.block_size)
        params, states = [piece.param for piece in pieces], [piece.state for piece in pieces]
        moments = self._storages()
        param = layout.gather(params, torch.float32)
        grad = layout.gather([piece.grad for piece in pieces], torch.float32)
        exp_avg, exp_avg_sq = (read_moment(name, states, moments[name], layout) for name in MOMENTS)
        adamw_update_(param, grad, exp_avg, exp_avg_sq, hyper)
        write_moment("exp_avg", states, moments["exp_avg"], layout, exp_avg)
        write_moment("exp_avg_sq", states, moments["exp_avg_sq"], layout, exp_avg_sq)
        if self.fp8_config.stochastic_rounding and dtype != torch.float32:
            param = stochastic_cast(param, dtype)
        layout.scatter(param, params)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or torch.optim.AdamW's `state_dict` gave; codes and scales come back untouched.

        Everything is checked first; on an error the optimizer is as it was. A moment stored in another way than
        `fp8_config` says (format, block size, expansion, or not quantized) is re-quantized, and one line of log
        says so. Hyper-parameters of the groups are those of the file, as in torch.optim.

        Args:
            state_dict: {"state": {index: {...}}, "param_groups": [...]}.

        Raises:
            ValueError: groups, indices, keys, dtypes or shapes that do not belong to these parameters. Also logged at
                ERROR, because a host may swallow the exception.
        """
        states: dict[Tensor, State] = {}

        def prepare(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            check_groups(loaded, self.param_groups)
            states.update(restored_states(loaded, self.param_groups, self._storages()))
            # torch would cast codes and scales to the parameter's dtype, so it gets only the groups.
            return {**loaded, "state": {}}

        def install(_: torch.optim.Optimizer) -> None:
            self.state.update(states)
            for group in self.param_groups:
                adopt_group(group, self.defaults)

        try:
            with (
                self.register_load_state_dict_pre_hook(prepare),
                self.register_load_state_dict_post_hook(install, prepend=True),
            ):
                super().load_state_dict(state_dict)
        except ValueError as error:
            logger.error("FP8AdamW: the optimizer state was not loaded: %s", error)
            raise

    def state_bytes(self) -> int:
        """Return the bytes of both moments, with their per-block numbers, over all parameters that have a state."""
        tensors = (tensor for state in self.state.values() for key, tensor in state.items() if key != "step")
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
