"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from .limits import known_limit, measured_limit
from .timing import ALLOCATED, RESIDENT

PACKAGES = (
    "torch",
    "triton",
    "coat-flux",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "optimum-quanto",
    "torchao",
)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, the device, and how fast it could be."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    limit = (known_limit(name) if on_gpu else None) or measured_limit(device)
    about: dict[str, Any] = {
        "device": name,
        "device_type": device.type,
        "memory": ALLOCATED if on_gpu else RESIDENT,
        "limit": limit.as_dict(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        about["device_memory_bytes"] = properties.total_memory
        about["capability"] = f"sm_{properties.major}{properties.minor}"
        about["cuda"] = torch.version.cuda
    return about


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
