"""torch.optim.AdamW with its moments stored in FP8; a step is one call of `ops.adamw` per group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from coat_core.config import FP8QuantizationConfig
from coat_core.ops.adamw import Hyper, fp8_adamw_step, hyper_of_step, hyper_table
from coat_core.optim.packing import DeviceState, PackedState
from coat_core.optim.state import Storage, check_groups, saved_states, storages, write_state

logger = logging.getLogger(__name__)

OFFLOADS = ("none", "cpu")
TORCH_ONLY_OPTIONS = ("amsgrad", "foreach", "differentiable", "fused")  # must be off here
TORCH_GROUP_KEYS = (*TORCH_ONLY_OPTIONS, "decoupled_weight_decay")  # only in groups of torch.optim.AdamW
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check_torch_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in TORCH_ONLY_OPTIONS:
            raise TypeError(f"{name}={value!r}: FP8AdamW has no such option; see torch.optim.AdamW and fp8_config")
        if value:
            raise ValueError(f"{name}={value!r}: not supported by FP8AdamW; leave it out or use torch.optim.AdamW")


def _check_options(options: dict[str, Any]) -> None:
    """Raise ValueError as torch.optim.AdamW does, in its words and with the rule."""
    lr, betas, seed = options["lr"], options["betas"], options["seed"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, not of shape {tuple(lr.shape)}")
    for name, words in (("lr", "learning rate"), ("eps", "epsilon value"), ("weight_decay", "weight_decay value")):
        if not options[name] >= 0.0:
            raise ValueError(f"Invalid {words}: {options[name]}; {name} must be 0 or more")
    if len(betas) != 2 or isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError(f"betas must be either both floats or both Tensors, not {betas!r}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}; must be from 0 to below 1")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r}: must be a whole number, 0 or more")


class FP8AdamW(torch.optim.Optimizer):
    """AdamW with exp_avg and exp_avg_sq stored as FP8 codes; drop-in for torch.optim.AdamW.

    w ← (1 − lr·λ)·w − lr·m̂/(sqrt(v̂) + ε), with m and v dequantized before and quantized after each step, in fp32 for
    parameters of any precision; bf16 and fp16 parameters are rounded once per step, to nearest or stochastically.

    Args:
        params: parameters or param groups as in torch.optim; fp32, bf16 or fp16.
        lr: a float or a one-element tensor.
        capturable: keep the step counters on the parameters' device, so that a replayed CUDA graph counts on. A lr that
            changes between replays is a tensor on the device. If all param groups have the same entry, that holds; a
            state file does not change it.
        seed: of all stochastic rounding. It is in the state file: with the step counters, a resumed run draws the same.
        fp8_config: how the moments are stored; like capturable and seed, the same for all groups.
        offload: "cpu" keeps the moments in CPU memory, pinned for a GPU; same results to the bit, same files. Not in a
            CUDA graph. Call `synchronize` before reading `state`.
        torch_options: torch.optim.AdamW's amsgrad, foreach, differentiable, fused; only False or None.

    Raises:
        ValueError: a hyper-parameter outside its range, a torch option that is on, an empty parameter list, or a
            parameter that is not fp32, bf16 or fp16.

    Numerics: with both moments unquantized, on a CPU, fp32 parameters are bit-equal to torch.optim.AdamW(foreach=False)
        and bf16 ones equal its fp32 result rounded to nearest. With expansion no nonzero exp_avg_sq comes back as zero.
    Source: arXiv 2410.19313, section 3; state layout in `optim.state`.
    """

    # fp32 [] on the parameters' device, or None; needs `capturable`. If it is 1, `step` changes no parameter, moment or
    # step counter; the CPU does not read it
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        capturable: bool = False,
        seed: int = 0,
        fp8_config: FP8QuantizationConfig | None = None,
        offload: str = "none",
        **torch_options: Any,
    ) -> None:
        _check_torch_options(torch_options)
        if offload not in OFFLOADS:
            raise ValueError(f"offload={offload!r}: must be one of {', '.join(OFFLOADS)}")
        self.offload = offload
        self.fp8_config = fp8_config or FP8QuantizationConfig()
        if isinstance(params, list | tuple):
            capturables = {group.get("capturable", capturable) for group in params if isinstance(group, dict)}
            if len(capturables) == 1:
                capturable = capturables.pop()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "capturable": capturable,
            "seed": seed,
            "fp8": asdict(self.fp8_config),
        }
        _check_options(defaults)

        self._packed: PackedState | None = None
        self._groups: dict[int, dict[str, Any]] = {}  # of each parameter, by its id; for `step_parameter`
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        own = {"fp8_config": self.fp8_config, "offload": self.offload, "_packed": None, "_groups": {}}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as torch.optim does, or raise ValueError as the class does."""
        super().add_param_group(param_group)
        self._groups = {}
        group, group_index = self.param_groups[-1], len(self.param_groups) - 1
        try:
            for key, argument in (("fp8", "fp8_config"), ("capturable", "capturable"), ("seed", "seed")):
                if group[key] != self.defaults[key]:
                    raise ValueError(
                        f"param group has its own {key!r}: it is the same for all groups; pass {argument} instead"
                    )
            _check_torch_options({k: v for k, v in group.items() if k in TORCH_ONLY_OPTIONS})
            _check_options(group)
            for index, param in enumerate(group["params"]):
                if param.dtype not in PARAM_DTYPES:
                    raise ValueError(
                        f"param_groups[{group_index}]['params'][{index}] of shape {tuple(param.shape)} has dtype "
                        f"{param.dtype}: FP8AdamW needs float32, bfloat16 or float16; convert it or use "
                        "torch.optim.AdamW"
                    )
        except ValueError:
            del self.param_groups[-1]
            raise
        for key in group.keys() & {"params", "param_names"}:
            group[key] = list(dict.fromkeys(group[key]))  # torch warns of duplicates; one step updates each once

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one optimization step on every parameter that has a gradient; returns the closure's loss, or None.

        Raises ValueError for `found_inf` without `capturable`, RuntimeError for a sparse gradient or a CUDA graph
        captured without `capturable`; nothing has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active: list[list[Tensor]] = []  # those with a gradient
        for group_index, group in enumerate(self.param_groups):
            active.append([])
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                if param.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"param_groups[{group_index}]['params'][{index}] of shape {tuple(param.shape)} has a sparse "
                        "gradient: FP8AdamW needs dense gradients; make the layer with sparse=False or use "
                        "torch.optim.SparseAdam for this parameter"
                    )
                active[-1].append(param)

        all_active = list(chain.from_iterable(active))
        if not all_active:
            return loss
        packed = self._packed_state(all_active)
        packed.count_step(all_active, self.found_inf)
        for group, params in zip(self.param_groups, active, strict=True):
            for batch in packed.batches(params):
                self._update(group, *batch)
        return loss

    @torch.no_grad()
    def make_states(self) -> None:
        """Make missing states, or pack loaded ones, as the first step would."""
        self._packed_state([param for group in self.param_groups for param in group["params"]])

    @torch.no_grad()
    def step_parameter(self, param: Tensor) -> None:
        """Do one parameter's step, for a hook in backward; ValueError for `found_inf` without `capturable`."""
        if self._packed is None or not self._groups:
            self.make_states()
            self._groups = {id(param): group for group in self.param_groups for param in group["params"]}
        assert self._packed is not None
        self._packed.count_step([param], self.found_inf)
        for batch in self._packed.batches([param]):
            self._update(self._groups[id(param)], *batch)

    def _packed_state(self, params: list[Tensor]) -> PackedState:
        known = self._packed is not None and self._packed.holds(self.state, params)
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            if not self.defaults["capturable"]:
                raise RuntimeError(
                    "capturable=False: a CUDA graph needs step counters on the GPU; pass capturable=True"
                )
            if not known:
                raise RuntimeError(
                    "first step inside a CUDA graph: do a step before the capture, which makes the state"
                )
            if self.offload != "none":
                raise RuntimeError("offload='cpu': a CUDA graph cannot hold the copies of moments; pass offload='none'")
        if self._packed is None or not known:
            self._packed = self._pack(params)

        seed = self.param_groups[0]["seed"]
        of_moments = self.fp8_config.moment_rounding != "nearest"
        of_parameters = self.fp8_config.stochastic_rounding
        if self._packed.seed != seed and (of_moments or of_parameters):
            self._packed.draw_from(seed, self._places(), of_moments, of_parameters)
        return self._packed

    def _pack(self, params: list[Tensor]) -> PackedState:
        self.synchronize()
        stored = storages(self.fp8_config)
        capturable = self.defaults["capturable"]
        return PackedState(self.state, params, stored, capturable, self.offload != "none")

    def _places(self) -> dict[int, tuple[int, int]]:
        """Return, by id, each parameter's number and the number of its first element in the whole parameter."""
        params = (param for group in self.param_groups for param in group["params"])
        return {id(param): (number, 0) for number, param in enumerate(params)}

    def _update(self, group: dict[str, Any], packed: DeviceState, indices: list[int], step: float | None) -> None:
        """Update a batch of `PackedState.batches`; `step` is None if step counters are on the device."""
        lr, eps, weight_decay = group["lr"], group["eps"], group["weight_decay"]
        betas = float(group["betas"][0]), float(group["betas"][1])
        lr_is_there = isinstance(lr, Tensor) and lr.device == packed.params[0].device
        tables = packed.draws_at(indices, step)
        if step is not None and not (lr_is_there and lr.device.type != "cpu"):
            hyper = hyper_of_step(lr, step, betas, eps, weight_decay)
        else:  # what depends on numbers on the device comes in a table
            hyper = Hyper(1 - betas[0], betas[1], 1 - betas[1], eps, math.nan, math.nan, math.nan)
            steps = packed.step_numbers(indices, step)
            table = hyper_table(lr if lr_is_there else float(lr), steps, betas, weight_decay)
            if self.found_inf is not None:
                table = table.masked_fill(self.found_inf > 0, math.nan)
            tables["table"] = table
        expansion = self.fp8_config.expansion
        for call in packed.calls(indices, tables):
            fp8_adamw_step(**call, hyper=hyper, expansion=expansion, maximize=group["maximize"])

    def synchronize(self) -> None:
        """Wait for the last step's copies of moments to CPU memory (`offload`)."""
        for staging in () if self._packed is None else self._packed.stagings:
            staging.synchronize()

    @property
    def staging(self) -> list[Tensor]:
        """Buffers on the parameters' device that offloaded moments pass through; empty without `offload`."""
        stagings = () if self._packed is None else self._packed.stagings
        return [tensor for staging in stagings for tensor in staging.tensors]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim does; the tensors are those of the optimizer."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of FP8AdamW or torch.optim.AdamW; codes and scales come back untouched.

        A moment stored otherwise than `fp8_config` says is re-quantized, with one line of log. Hyper-parameters of
        the groups are those of the file, as in torch.optim. Raises ValueError, before anything has changed, where the
        file does not fit; also logged at ERROR, because ai-toolkit swallows the exception.
        """
        saved: list[tuple[Tensor, dict[str, Any], dict[str, Storage]]] = []
        stored = storages(self.fp8_config)

        def prepare(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            check_groups(loaded, self.param_groups)
            saved.extend(saved_states(loaded, self.param_groups, stored))
            self.synchronize()  # the file may be this optimizer's own `state_dict`
            # torch would cast codes and scales to the parameter's dtype, so it gets no parameter's state
            params = set(chain.from_iterable(group["params"] for group in loaded["param_groups"]))
            return {**loaded, "state": {key: entry for key, entry in loaded["state"].items() if key not in params}}

        @torch.no_grad()
        def install(_: torch.optim.Optimizer) -> None:
            self._packed, self._groups = None, {}
            for group in self.param_groups:  # of the file
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
                for key in TORCH_GROUP_KEYS:  # torch itself adds `differentiable` to the defaults
                    group.pop(key, None)
                group.update(fp8=self.defaults["fp8"], capturable=self.defaults["capturable"])
            if saved:
                self._packed = self._pack([param for param, _, _ in saved])
            for param, tensors, stored_in_file in saved:
                write_state(self.state[param], tensors, stored_in_file, stored, param.device)

        try:
            with (
                self.register_load_state_dict_pre_hook(prepare),
                self.register_load_state_dict_post_hook(install, prepend=True),
            ):
                super().load_state_dict(state_dict)
        except ValueError as error:
            message = f"{error}; load the optimizer state of this run, or start without one"
            logger.error("FP8AdamW: the optimizer state was not loaded: %s", message)
            raise ValueError(message) from error

    def state_bytes(self) -> int:
        """Bytes of all moments, with their numbers per block."""
        states = [state for param, state in self.state.items() if isinstance(param, Tensor)]
        return sum(tensor.nbytes for state in states for key, tensor in state.items() if key != "step")
