"""The transformer as it is after its weights were quantized, in one file, for the next start.

A start with a cache reads the codes, the scales and the few weights that stay as they are: 12 GB in FP8 where FLUX.1
has 24. The file's name is made of the model's name and of all that decides how its weights are stored, so that there is
one file for each model and format; what it was made of is in its metadata:

    source     size, date and digest (`saves.identity.file_digest`: 16 pieces of 64 KB) of each file with weights
    format     version of this file's format
    sums       a checksum of each tensor
    precision  what each cast lost, which nobody can measure without the original

Size, date and pieces together: a change that keeps the size and misses all pieces changes the date, unless someone
sets it back. Reading all 24 GB for a digest would cost what the cache saves.

Files are under `huggingface_hub.cached_assets_path`: HF_HOME/assets, where the hub's own cache is HF_HOME/hub.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from coat_core.linear.module import FP8Linear

from ...base.files import TEMP_PREFIX, discard, replacing
from ...blocks.apply import convert_weights
from ...blocks.cast_loss import WEIGHT_PRECISION
from ...config.build import to_plain
from ...config.checkpoint_file import CheckpointError, read_header
from ...config.coat import COATConfig
from ...plan.space import LEAST_SAVED
from ...saves.identity import file_digest
from ..weights import Place, Weights, check_weights

__all__ = ["CodeCache", "find_cache"]

VERSION = "1"  # of the file and of how weights become codes; raise it when either changes
SPARE_BYTES = 2e9  # of disk that a cache leaves free, for the run's saves
ABANDONED_S = 3600  # a file under way that nobody has written to for so long was left by a killed process
TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def find_cache(
    name_or_path: str,
    weights: Weights,
    dtype: torch.dtype,
    coat: COATConfig,
    device: torch.device,
    log: Callable[[str], None],
) -> CodeCache | None:
    """The cache for these weights, whether there is a file or not; None where `coat.weight` or their size rule it out.

    Args:
        name_or_path: the model.
        weights: its original ones.
        dtype: they are cast to it before they are quantized.
        coat: the `coat:` block.
        device: where that is done.
        log: takes a line where the folder of caches cannot be made.
    """
    wanted = coat.enabled and coat.weight.use_fp8 and coat.weight.cache
    if not wanted or weights.nbytes < LEAST_SAVED:
        return None
    place = Path(name_or_path)
    model, named = (str(place.resolve()), place.resolve().name) if place.exists() else (name_or_path, name_or_path)
    how = [model, str(dtype), device.type, {**to_plain(coat.weight), "cache": True}]
    name = f"{coat.weight.format}-{hashlib.sha256(json.dumps(how).encode()).hexdigest()[:12]}.safetensors"
    files = [(path, path.stat()) for path in weights.files]
    source = [[path.name, stat.st_size, stat.st_mtime_ns, file_digest(path)] for path, stat in files]
    subfolder = re.sub(r"[^\w.-]+", "--", named).strip(".-") or "model"
    try:
        folder = cached_assets_path("coat_flux", namespace="weights", subfolder=subfolder)
    except OSError as error:
        log(f"The quantized weights are not cached ({error}); the run continues without")
        return None
    return CodeCache(folder / name, json.dumps(source), weights.nbytes, coat, device)


@dataclass(frozen=True)
class CodeCache:
    """The file of one model in one format.

    Attributes:
        path: of the file.
        source: which files it was made of, as in its metadata.
        original_bytes: of these files' weights.
        coat: the `coat:` block.
        device: where the weights go.
    """

    path: Path
    source: str
    original_bytes: int
    coat: COATConfig
    device: torch.device

    @property
    def exists(self) -> bool:
        """Whether there is a file."""
        return self.path.is_file()

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, model: nn.Module, log: Callable[[str], None]) -> bool:
        """Convert a model and fill it from the file.

        Args:
            model: on the meta device, as its class makes it.
            log: takes a line.

        Returns:
            Whether it was filled; if not, it is to be dropped.
        """
        try:
            self._load(model)
        except (CheckpointError, SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).partition(";")[0]
            log(f"The cache of quantized weights {self.path} {reason}; the weights are quantized again")
            return False
        log(f"The quantized weights are read from the cache {self.path}")
        return True

    def _load(self, model: nn.Module) -> None:
        header = read_header(self.path)
        with safe_open(self.path, framework="pt") as file:
            about = file.metadata() or {}
        if about.get("format") != VERSION:
            raise CheckpointError("is of another version")
        if about["source"] != self.source:
            raise CheckpointError("is of other weights: the model's files have changed")
        here = replace(self.coat, memory=replace(self.coat.memory, stream_blocks=0))  # nothing to take off the device
        convert = convert_weights(model, here, torch.device("meta"))
        assert convert is not None
        for name, module in list(model.named_modules()):
            convert(name, module)
        streams = self.coat.memory.stream_blocks != 0
        on_host = {
            f"{name}.{key}" for name, m in model.named_modules() if isinstance(m, FP8Linear) for key in m.state_dict()
        }
        places = {name: Place(self.path, name, tuple(entry["shape"])) for name, entry in header.items()}
        weights = Weights(places, self.path.stat().st_size)
        check_weights(model, weights, "the model")
        state, sums = {}, json.loads(about["sums"])
        for name, meant in model.state_dict().items():
            tensor = weights.read(name)
            if tensor.dtype != meant.dtype:
                raise CheckpointError(f"has {name} in {tensor.dtype}, not {meant.dtype}")
            state[name] = tensor.to("cpu" if streams and name in on_host else self.device, copy=True)
            del tensor
            if _checksum(state[name]) != sums[name]:
                raise CheckpointError("is damaged")
        weights.close()
        model.load_state_dict(state, assign=True)
        for name, precision in json.loads(about["precision"]).items():
            setattr(model.get_submodule(name), WEIGHT_PRECISION, precision)

    # -- writing -------------------------------------------------------------------------------------------------------

    def store(self, model: nn.Module, log: Callable[[str], None]) -> None:
        """Write the file, tensor by tensor, where the next start has less to read then; a failure is one line.

        Args:
            model: its weights quantized.
            log: takes the line.
        """
        state = dict(sorted(model.state_dict().items(), key=lambda item: -item[1].element_size()))  # aligned
        size = sum(tensor.nbytes for tensor in state.values())
        if self.original_bytes - size < LEAST_SAVED:
            return
        folder = self.path.parent
        try:
            discard(self.path)
            for left in folder.glob(f"{TEMP_PREFIX}*"):
                if left.stat().st_mtime < time.time() - ABANDONED_S:
                    discard(left)
            free = shutil.disk_usage(folder).free
            if free < size + SPARE_BYTES:
                raise OSError(f"{size / 1e9:.1f} GB and {SPARE_BYTES / 1e9:.0f} to spare, {free / 1e9:.1f} are free")
            with replacing(self.path, sync=False) as temp:
                _write(temp, state, self._about(model, state))
            others = [path.stat().st_size for path in folder.glob("*.safetensors") if path != self.path]
        except OSError as error:
            log(f"The quantized weights are not cached in {folder} ({error}); the run continues without")
            return
        more = f"; {len(others)} more of this model there, {sum(others) / 1e9:.1f} GB" if others else ""
        log(f"The quantized weights are cached in {self.path} ({size / 1e9:.1f} GB{more}); remove what you do not need")

    def _about(self, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
        noted = {name: getattr(module, WEIGHT_PRECISION, None) for name, module in model.named_modules()}
        precision = {name: value for name, value in noted.items() if value is not None}
        return {
            "format": VERSION,
            "source": self.source,
            "sums": json.dumps({name: _checksum(tensor) for name, tensor in state.items()}),
            "precision": json.dumps(precision),
        }


def _checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bytes, taken as 64 bit numbers, modulo 2⁶⁴: as fast as memory is read."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = data.numel() // 8 * 8
    return int(data[:words].view(torch.int64).sum() + data[words:].sum(dtype=torch.int64))


def _write(path: Path, state: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A safetensors file; safetensors' own writer first brings all tensors into CPU memory."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name, tensor in state.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in state.values():
            file.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
