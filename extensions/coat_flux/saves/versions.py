"""What a run was made with: `coat/versions.json`, for its report."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..base.files import write_file

__all__ = ["VERSIONS_FILE", "write_versions"]

VERSIONS_FILE = Path("coat") / "versions.json"
PACKAGES = ("coat-flux", "torch", "triton", "diffusers", "transformers", "peft", "accelerate", "safetensors")


def write_versions(run_dir: Path, host: str, device: torch.device) -> None:
    """Write versions of host, packages, Python, and the device's name.

    Args:
        run_dir: of the run.
        host: "stand-alone", or ai-toolkit with its version.
        device: of the run.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    found = {"trained by": host, "device": f"{device.type}: {name}", "system": platform.platform(terse=True)}
    found["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    write_file(run_dir / VERSIONS_FILE, json.dumps(found, indent=1))
