"""Reading and writing LoRA files: safetensors only, and a file is whole or not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..base.errors import UserError
from ..base.files import replacing

__all__ = ["ExportError", "naming", "read_file", "staged", "write_file"]

STALE_HASHES = ("sshs_model_hash", "sshs_legacy_hash")  # of the tensors as they were before a conversion


class ExportError(UserError, ValueError):
    """A LoRA file is not what others can load, or cannot be converted; the message says why and what to do."""


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        ExportError: it is missing, torn, or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{path}: cannot be read as safetensors ({error}); give the .safetensors file of a LoRA, "
            "and if it is one, it is damaged: take an earlier save"
        ) from error


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file."""
    kept = {key: value for key, value in metadata.items() if key not in STALE_HASHES}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, kept | {"format": "pt"})


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before what goes wrong in the block."""
    try:
        yield
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from error


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` when the block ends well, and is removed when it does not."""
    try:
        with replacing(path) as temp:
            yield temp
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{path}: cannot be written ({error}); free space or give another --out") from error
