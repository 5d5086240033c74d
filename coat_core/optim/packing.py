"""The state of all parameters in one buffer of each kind; the tensors of `Optimizer.state` are views into them.

A step collects no list of state tensors: the operator reads the buffers. Files do not change: `state_dict` has the same
tensors per parameter, and torch.save writes shared memory once.

    codes of a moment    [n_blocks, B]        parameter 0 from block 0 on, the next one in the block after its last
    numbers of a moment  fp32 [S, n_blocks]   scale, exponent, center
    steps                fp32 [n_params]
    draws                int32 [n_params, 2]  for stochastic rounding: stream, first element; in no file

Codes and numbers are on the parameters' device, or in CPU memory (`offload`), passing through the device in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coat_core.ops.packing import chunks, n_blocks
from coat_core.optim.offload import Staging
from coat_core.optim.state import State, Storage, empty_moment, moment_views
from coat_core.rounding import PARAMETERS, streams


class DeviceState:
    """The packed state of the parameters on one device."""

    def __init__(self, params: list[Tensor], moments: dict[str, Storage], steps_on_device: bool, offload: bool) -> None:
        device = params[0].device
        block_size = next(iter(moments.values())).block_size
        self.params = params
        self.first_blocks = []
        blocks = 0
        for param in params:
            self.first_blocks.append(blocks)
            blocks += n_blocks(param.numel(), block_size)
        home = torch.device("cpu") if offload else device
        self.moments = {name: empty_moment(blocks, storage, home) for name, storage in moments.items()}
        self.staging = Staging(self.moments, moments, device) if offload else None
        self.steps = torch.zeros(len(params), dtype=torch.float32, device=device if steps_on_device else "cpu")
        self.draws: Tensor | None = None
        self.param_draws: Tensor | None = None
        self.views: list[State] = []
        for step, param, first in zip(self.steps.unbind(), params, self.first_blocks, strict=True):
            state: State = {"step": step}
            for name, storage in moments.items():
                state.update(moment_views(name, self.moments[name], storage, first, param.shape))
            self.views.append(state)


class Batch(NamedTuple):
    """Parameters that are updated alike."""

    params: list[Tensor]  # of one device and dtype
    grads: list[Tensor]  # of one dtype
    indices: list[int]  # where each parameter is among those of its device
    packed: DeviceState  # the state on that device
    step: float | None  # the number of the step; None where it is only on the device

    def steps(self) -> Tensor:
        """Return the step numbers as fp32 [n] on the parameters' device, without reading any."""
        if self.step is not None:
            return torch.full((len(self.params),), self.step, device=self.params[0].device)
        return self._chosen(self.packed.steps)

    def draws(self, of: Tensor | None) -> Tensor | None:
        """Return stream, step and first element, int32 [n, 3], without reading any."""
        if of is None:
            return None
        stream, first = self._chosen(of).unbind(-1)
        return torch.stack((stream, self.steps().to(torch.int32), first), dim=-1)

    def _chosen(self, numbers: Tensor) -> Tensor:
        first = self.indices[0]
        if self.indices == list(range(first, first + len(self.indices))):
            return numbers[first:][: len(self.indices)]
        return torch.stack([numbers[index] for index in self.indices])

    def calls(self, **tables: Tensor | None) -> Iterator[dict[str, Any]]:
        """Yield arguments of the operator's calls, to be made one by one: several for offloaded moments.

        `tables` have a row for each parameter; those of `draws` are int32.
        """
        packed = self.packed
        first_blocks = [packed.first_blocks[index] for index in self.indices]
        if packed.staging is None:
            whole = {"params": self.params, "grads": self.grads, "first_blocks": first_blocks}
            yield {**whole, **packed.moments, **tables}
            return
        params = [param.detach().reshape(-1) for param in self.params]
        grads = [grad.detach().reshape(-1) for grad in self.grads]
        block_size = packed.moments["exp_avg"].codes.shape[1]
        sizes = tuple(map(Tensor.numel, params))
        for chunk in chunks(sizes, tuple(first_blocks), block_size, packed.staging.elements):
            if chunk.rows.start == chunk.rows.stop:
                continue
            part = {
                "params": [params[i][start:stop] for i, start, stop in chunk.pieces],
                "grads": [grads[i][start:stop] for i, start, stop in chunk.pieces],
                "first_blocks": [0, *accumulate(chunk.layout.blocks[:-1])],
            }
            first, start, _ = chunk.pieces[0]
            rows = {name: _rows(table, first, len(chunk.pieces), start) for name, table in tables.items()}
            with packed.staging.blocks(chunk.rows) as moments:
                yield {**part, **moments, **rows}
        for param, flat in zip(self.params, params, strict=True):
            if not param.is_contiguous():  # then `flat` is a copy
                param.copy_(flat.view(param.shape))


def _rows(table: Tensor | None, first: int, count: int, start: int) -> Tensor | None:
    """Return rows of a table; those of draws count from element `start` of the first parameter."""
    if table is None:
        return None
    counts_on = start > 0 and not table.is_floating_point()
    if len(table) == count and not counts_on:
        return table
    rows = table[first:][:count].clone()  # kernels want it at a multiple of 16 bytes
    if counts_on:
        rows[0, 2] += start
    return rows


class PackedState:
    """The packed state of all parameters by device; entries of `state` become views, those of `new` start at zero."""

    def __init__(
        self,
        state: MutableMapping[Tensor, State],
        new: Iterable[Tensor],
        moments: dict[str, Storage],
        steps_on_device: bool,
        offload: bool = False,
    ) -> None:
        self._steps_on_device = steps_on_device
        self.seed: int | None = None
        added = {id(param) for param in new if not state.setdefault(param, {})}
        self._params = [param for param, entry in state.items() if entry or id(param) in added]
        self._devices = [param.device for param in self._params]
        self._entries = [state[param] for param in self._params]
        self.devices: dict[torch.device, DeviceState] = {}
        self._indices: dict[int, int] = {}
        for device in dict.fromkeys(self._devices):
            here = [param for param in self._params if param.device == device]
            self.devices[device] = packed = DeviceState(here, moments, steps_on_device, offload)
            for index, (param, views) in enumerate(zip(here, packed.views, strict=True)):
                self._indices[id(param)] = index
                entry = state[param]
                for key, values in entry.items():
                    views[key].copy_(values)
                entry.clear()
                entry.update(views)
        self._addresses = [tensor.data_ptr() for entry in self._entries for tensor in entry.values()]

    def number(self, seed: int, places: dict[int, tuple[int, int]], moments: bool, parameters: bool) -> None:
        """Draw from `seed` from now on, for exp_avg_sq, for parameters in bf16 and fp16, or for both.

        `places` has, by id, each parameter's number and, of a shard, the number of its first element in the whole.
        """
        self.seed = seed
        for packed in self.devices.values():
            packed.draws = _draws(packed.params, seed, places) if moments else None
            packed.param_draws = _draws(packed.params, seed ^ PARAMETERS, places) if parameters else None

    def holds(self, state: MutableMapping[Tensor, State], params: list[Tensor]) -> bool:
        """Whether all parameters, `params` among them, still have their packed state."""
        entries = [entry for entry in state.values() if entry]
        return (
            len(entries) == len(self._entries)
            and all(entry is own for entry, own in zip(entries, self._entries, strict=True))
            and self._indices.keys() >= set(map(id, params))
            and [param.device for param in self._params] == self._devices
            and [tensor.data_ptr() for entry in entries for tensor in entry.values()] == self._addresses
        )

    def count_step(self, params: list[Tensor], found_inf: Tensor | None = None) -> None:
        """Add 1 to the step counters of these parameters; 0 where `found_inf`, on the counters' device, is 1."""
        if found_inf is not None and not self._steps_on_device:
            raise ValueError("found_inf: needs step counters on the device; pass capturable=True")
        one = 1.0 if found_inf is None else 1.0 - found_inf
        if len(params) == len(self._params):
            for packed in self.devices.values():
                packed.steps += one
            return
        steps = [self.devices[param.device].views[self._indices[id(param)]]["step"] for param in params]
        if len(steps) == 1:  # in backward, where a foreach operator of one tensor reads the number
            steps[0] += one
        else:
            torch._foreach_add_(steps, one)

    def batches(self, params: list[Tensor]) -> Iterator[Batch]:
        """Group parameters with gradients by device, dtypes and, if on the CPU, step number."""
        grads = [param.grad for param in params if param.grad is not None]
        indices = [self._indices[id(param)] for param in params]
        devices = [param.device for param in params]
        steps: list[float | None] = [None] * len(params)
        if not self._steps_on_device:  # read all at once: a read for each would take longer than the rest
            counts = {device: packed.steps.tolist() for device, packed in self.devices.items()}
            steps = [counts[device][index] for device, index in zip(devices, indices, strict=True)]
        dtypes = [param.dtype for param in params], [grad.dtype for grad in grads]
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, kind in enumerate(zip(devices, *dtypes, steps, strict=True)):
            kinds.setdefault(kind, []).append(i)
        for (device, _, _, step), alike in kinds.items():
            yield Batch(
                [params[i] for i in alike],
                [grads[i] for i in alike],
                [indices[i] for i in alike],
                self.devices[device],
                step,
            )


def _draws(params: list[Tensor], seed: int, places: dict[int, tuple[int, int]]) -> Tensor:
    """Return stream and first element, int32 [n, 2] on the parameters' device, without a sync."""
    every = streams(seed, len(places), params[0].device)
    own = [places.get(id(param), (0, 0)) for param in params]  # one in no group has no step
    return torch.stack([torch.stack((every[i], torch.full_like(every[i], first))) for i, first in own])
