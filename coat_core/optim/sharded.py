"""FP8AdamW for parameters that FSDP2 (`fully_shard`) has sharded, and its state for torch.distributed.checkpoint.

Each process steps its own rows: the update is by element, and a block's scale is in the process that has its numbers,
so no shard may cut a block. Blocks run over the flattened parameter, and FSDP2 gives N processes ceil(R / N) rows of R
each, so

    row of K elements, K a multiple of the block size B     every shard ends where a block ends
    K divides B                                             if ceil(R / N) is a multiple of B / K

Other parameters (`cut_parameters`: small biases and norms) stay whole in every process, `fully_shard`'s
`ignored_params`; the process that runs the model sums those gradients. So blocks, codes and scales are those of one
process with the whole parameter, for any N, and checkpoints and `whole_state_dict` do not depend on N.

Shapes: parameter [R, ...] with rows of K elements; numbers of blocks, flat in the optimizer, are gathered as [R, K / B]
or [R K / B, 1]: sharded along dim 0, they are cut where the parameter is.
Source: arXiv 2410.19313, section 3; torch.distributed.fsdp.fully_shard (rows by torch.chunk).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coat_core.ops.launch import n_blocks
from coat_core.optim.fp8_adamw import FP8AdamW
from coat_core.optim.state import MOMENT_OF, check_groups, storages

if dist.is_available():  # not in every build of torch
    from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether FSDP2 has sharded a tensor."""
    return dist.is_available() and isinstance(tensor, DTensor)


def cut_parameters(model: nn.Module, processes: int, block_size: int) -> set[nn.Parameter]:
    """The trained parameters whose blocks a shard would cut: `fully_shard`'s `ignored_params`."""
    params = model.parameters()
    return {param for param in params if param.requires_grad and not _fits(param.shape, processes, block_size)}


def local_values(tensor: Tensor) -> Tensor:
    """This process's rows, in the same memory; an unsharded tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """Return, as a view, this process's rows of `whole`, sharded like `tensor`."""
    if not is_sharded(tensor):
        return whole
    each = -(-tensor.shape[0] // tensor.device_mesh.size())
    return whole[tensor.device_mesh.get_local_rank() * each :][:each]


@torch.no_grad()
def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Return CPU copies of whole tensors, gathered one by one; all processes call it together."""
    copies = {}
    for name, tensor in tensors.items():
        own = tensor.detach()
        whole = own.full_tensor() if is_sharded(own) else own
        if keep:
            copies[name] = whole.to("cpu", copy=True)
    return copies


def _fits(shape: torch.Size, processes: int, block_size: int) -> bool:
    if not shape:
        return False
    width = shape[1:].numel()
    if width % block_size == 0:
        return True
    return block_size % width == 0 and -(-shape[0] // processes) % (block_size // width) == 0


class ShardedFP8AdamW(FP8AdamW):
    """FP8AdamW over this process's rows of parameters sharded by `fully_shard`, and over whole ones.

    `params` maps names to parameters, after `fully_shard`. `state_dict` and the state are those of the local rows;
    `checkpoint_state` and `whole_state_dict` fit any number of processes. Raises ValueError for a parameter sharded
    along another dimension than the first or over several, for a cut block, and for `offload`.

    Numerics: given the same gradient, the local rows get FP8AdamW's bits of the whole parameter, stochastic ones too.
    """

    def __init__(self, params: Mapping[str, Tensor], **options: Any) -> None:
        if options.get("offload", "none") != "none":
            raise ValueError("offload='cpu': not for sharded parameters, whose moments are divided already; pass none")
        self._whole = dict(params)
        self._own = {name: local_values(param).detach().requires_grad_() for name, param in self._whole.items()}
        super().__init__([param for param in self._own.values() if param.numel()], **options)
        for name, param in self._whole.items():
            if not is_sharded(param):
                continue
            if len(param.placements) != 1 or param.placements[0] != Shard(0):
                raise ValueError(
                    f"{name} has placements {param.placements}: FP8AdamW takes Shard(0) over one mesh dimension"
                )
            if not _fits(param.shape, param.device_mesh.size(), self.fp8_config.block_size):
                raise ValueError(
                    f"{name} of shape {tuple(param.shape)}: a shard cuts a block of {self.fp8_config.block_size} "
                    "moments; pass cut_parameters(...) to fully_shard as ignored_params"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> float | None:  # type: ignore[override]
        """Do one optimization step on the rows of every parameter that has a gradient; as FP8AdamW's."""
        if closure is not None:
            raise ValueError("closure: not for sharded parameters; compute the loss before the step")
        for name, param in self._whole.items():
            self._own[name].grad = None if param.grad is None else local_values(param.grad)
        super().step()
        for own in self._own.values():
            own.grad = None
        return None

    def _places(self) -> dict[int, tuple[int, int]]:
        pairs = enumerate(self._whole.items())
        return {id(self._own[name]): (number, _first_element(param)) for number, (name, param) in pairs}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters."""
        for param in self._whole.values():
            param.grad = None

    @torch.no_grad()
    def checkpoint_state(self) -> dict[str, dict[str, Tensor]]:
        """The state of each parameter by name, for torch.distributed.checkpoint; loading into it loads it here.

        Zeros before the first step. Moments have the parameter's shape and sharding, 8-bit ones as uint8, since gloo
        exchanges no FP8. Keys name the storage, so loading a checkpoint stored otherwise is a missing key in torch.
        """
        held = [param for param in self._own.values() if param.numel()]
        if held:
            self._packed_state(held)
        block = self.fp8_config.block_size
        stored = storages(self.fp8_config)
        states: dict[str, dict[str, Tensor]] = {}
        for name, param in self._whole.items():
            state = self.state.get(self._own[name]) or self._empty_state(self._own[name])
            width = param.shape[1:].numel()
            each = 1 if width % block else width // block  # blocks of a row, or one of several rows
            shape_of_numbers = torch.Size((n_blocks(param.numel(), block) // each, each))
            sharded = {"step": state["step"]}
            for key, value in state.items():
                if key in MOMENT_OF:
                    bits = value.view(torch.uint8) if value.itemsize == 1 else value
                    described = f"{key} {stored[MOMENT_OF[key]].describe()}"
                    sharded[described] = _sharded_like(param, bits, param.shape)
                elif key != "step":
                    sharded[key] = _sharded_like(param, value.view(-1, each), shape_of_numbers)
            states[name] = sharded
        return states

    @torch.no_grad()
    def whole_state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Return `state_dict` of an FP8AdamW over the whole parameters, in CPU memory; all processes call it.

        Parameters without a step have zeros. A process without `keep` gets no states.
        """
        stored = storages(self.fp8_config)
        states: dict[int, dict[str, Tensor]] = {}
        for index, sharded in enumerate(self.checkpoint_state().values()):
            states[index] = {}
            for described, value in gather(sharded, keep).items():
                key = described.partition(" ")[0]
                if key in MOMENT_OF:
                    value = value.view(stored[MOMENT_OF[key]].dtype)
                elif key != "step":
                    value = value.flatten()
                states[index][key] = value
        groups = [{**group, "params": list(range(len(self._whole)))} for group in self.param_groups]
        return {"state": states if keep else {}, "param_groups": groups}

    def load_whole_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the local rows of a `whole_state_dict`, or of one process's `state_dict`."""
        check_groups(dict(state_dict), [{"params": list(self._whole)}])
        (group,) = state_dict["param_groups"]
        states: dict[int, dict[str, Any]] = {}
        held: list[int] = []
        for index, (name, param) in zip(group["params"], self._whole.items(), strict=True):
            saved = state_dict["state"].get(index)
            rows = self._rows_of_state(name, param, saved, group) if saved else {}
            if self._own[name].numel():
                held.append(index)
                states |= {index: rows} if rows else {}
        self.load_state_dict({"state": states, "param_groups": [{**group, "params": held}]})

    def _rows_of_state(
        self, name: str, param: Tensor, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        if not is_sharded(param):
            return dict(saved)
        block = int((group.get("fp8") or {}).get("block_size", 0))
        processes = param.device_mesh.size()
        rows: dict[str, Any] = {}
        for key, value in saved.items():
            if key == "step":
                rows[key] = value
                continue
            numbers = key not in MOMENT_OF
            if numbers and not (block and _fits(param.shape, processes, block)):
                raise ValueError(
                    f"{name} over {processes} processes: a shard cuts a block of {block} moments of the file; "
                    "go on with the block_size of the file, or with another number of processes"
                )
            whole = (n_blocks(param.numel(), block),) if numbers else tuple(param.shape)
            if tuple(value.shape) != whole:
                raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}: must be {whole}")
            if numbers:
                first = _first_element(param) // block
                rows[key] = value[first:][: n_blocks(self._own[name].numel(), block)]
            else:
                rows[key] = rows_like(param, value)
        return rows

    def _empty_state(self, own: Tensor) -> dict[str, Tensor]:
        other = next(iter(self.state.values()))
        empty = {"step": other["step"].clone()}
        for key, value in other.items():
            if key != "step":
                empty[key] = value.new_empty(own.shape if key in MOMENT_OF else (0,))
        return empty


def _first_element(param: Tensor) -> int:
    if not is_sharded(param):
        return 0
    rows = -(-param.shape[0] // param.device_mesh.size())
    return int(param.device_mesh.get_local_rank() * rows * param.shape[1:].numel())


def _sharded_like(param: Tensor, own: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of `shape`, sharded as the parameter is, with local part `own`; `own` if that is whole."""
    if not is_sharded(param):
        return own
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)
