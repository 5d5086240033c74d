"""The stand-in, copied to a temporary folder with the extension linked, and imported in this process."""

import importlib
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[3]
CHECKOUT = Path(__file__).parent / "checkout"
PACKAGE = REPOSITORY / "extensions" / "coat_flux"
VERSION, NEWER_VERSION = "0.12.26", "0.13.19"
HOST_MODULES = (
    "toolkit", "jobs", "extensions", "extensions_built_in", "version", "late", "coat_flux.trainers.ai_toolkit",
)  # fmt: skip
PHOTOS = 5
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
COAT_ENTRY = {"model": {"quantize": True, "qtype": "coat_fp8"}, "train": {"optimizer": "coat_fp8_adamw", "lr": 1e-3}}


def make_entry(root: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """A whole process entry on five photos below `root`; a block of `changes` is laid over its own block."""
    photos = root / "photos"
    if not photos.exists():
        photos.mkdir()
        for number in range(PHOTOS):
            Image.new("RGB", (64, 64), (40 * number, 90, 120)).save(photos / f"{number}.png")
            (photos / f"{number}.txt").write_text(f"coatwear, photo {number} of a shirt")
    entry: dict[str, Any] = {
        "type": kind, "training_folder": str(root / "out"), "training_seed": 7, "trigger_word": "coatwear",
        "model": {"name_or_path": str(PACKAGE / "mini_flux" / "files"), "is_flux": True},
        "network": {"type": "lora", "linear": 4}, "train": {"noise_scheduler": "flowmatch", "steps": 3},
        "datasets": [{"folder_path": str(photos), "resolution": [64]}],
    }  # fmt: skip
    for key, value in changes.items():
        entry[key] = {**entry.get(key, {}), **value} if isinstance(value, dict) else value
    return entry


def copy_checkout(root: Path) -> Path:
    """Copy the stand-in to `root`, with an empty extensions folder; returns `root`."""
    shutil.copytree(CHECKOUT, root, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "extensions").mkdir()
    return root


class Host:
    """A copy of the stand-in whose modules are imported in this process while the test runs."""

    def __init__(self, root: Path):
        self.root = root

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.root / file).read_text()
        assert old in text
        (self.root / file).write_text(text.replace(old, new))

    def load(self, name: str) -> ModuleType:
        return importlib.import_module(name)

    def start(self) -> dict[str, Any]:
        self.load("jobs.process")
        return self.load("toolkit.extension").process_classes()

    def run(self, kind: str = "coat_flux_trainer", **entry: Any) -> Any:
        job = self.load("jobs.process.job").Job(make_entry(self.root, kind, **entry))
        job.run()
        return job.process[0]

    def optimizer(self, folder: str = "out") -> Any:
        return torch.load(self.root / folder / "standin_job" / "optimizer.pt", weights_only=True)

    def lora(self, folder: str = "out") -> dict[str, torch.Tensor]:
        return load_file(self.root / folder / "standin_job" / "standin_job.safetensors")

    @property
    def save_folder(self) -> Path:
        return self.root / "out" / "standin_job"


@contextmanager
def fresh_host(root: Path) -> Iterator[Host]:
    """A stand-in in `root` with the extension linked; nothing of it stays in sys.modules or in our loggers.

    For speed the files of its runs are not flushed to the disk.
    """

    def loaded() -> list[str]:
        return [name for name in sys.modules if any(name == top or name.startswith(f"{top}.") for top in HOST_MODULES)]

    copy_checkout(root)
    (root / "extensions" / "coat_flux").symlink_to(PACKAGE, target_is_directory=True)
    before = {name: sys.modules.pop(name) for name in loaded()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        patch.setattr("os.fsync", lambda file: None)
        yield Host(root)
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(before)
    logging.disable(logging.NOTSET)
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if name.split(".")[0] in ("coat_core", "coat_flux") and isinstance(logger, logging.Logger):
            vars(logger).pop("manager", None)
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.NOTSET)


@pytest.fixture(name="host")
def standin_host(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    """The stand-in, or with a parameter (`both_hosts`) that of another version's interface."""
    with fresh_host(tmp_path / "ait") as host:
        host.edit("version.py", VERSION, getattr(request, "param", VERSION))
        yield host


both_hosts = pytest.mark.parametrize("host", [VERSION, NEWER_VERSION], indirect=True)


def run_whole(root: Path, **entry: Any) -> Path:
    """The folder of a job that nothing stops, in a stand-in of its own."""
    with fresh_host(root) as host:
        host.run(**entry)
        return host.save_folder
