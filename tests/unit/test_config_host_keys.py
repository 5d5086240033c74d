"""The list of ai-toolkit's keys: every key has one place, and the list matches a real checkout where there is one."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from coat_flux.config.ai_toolkit_keys import HOST_VERSION, NO_EFFECT, UNSUPPORTED
from coat_flux.config.build import config_fields
from coat_flux.config.job import HOST, JobConfig
from coat_flux.config.job_sections import (
    DatasetSection,
    EMASection,
    LoggingSection,
    ModelSection,
    NetworkSection,
    SampleItem,
    SampleSection,
    SaveSection,
    TrainSection,
)

HOST_CLASSES = {
    "NetworkConfig": NetworkSection,
    "SaveConfig": SaveSection,
    "DatasetConfig": DatasetSection,
    "TrainConfig": TrainSection,
    "ModelConfig": ModelSection,
    "SampleConfig": SampleSection,
    "SampleItem": SampleItem,
    "LoggingConfig": LoggingSection,
    "EMAConfig": EMASection,
}
# Ours differ on purpose; the reason is in job_sections.
OTHER_DEFAULTS = {("TrainConfig", "noise_scheduler"), ("SampleConfig", "sampler")}


@pytest.mark.parametrize("cls", list(HOST), ids=lambda cls: cls.__name__)
def test_no_key_is_in_two_lists(cls):
    ours, host = set(config_fields(cls)), HOST[cls]
    assert not ours & set(host.no_effect)
    assert not ours & set(host.unsupported)
    assert not set(host.no_effect) & set(host.unsupported)


def test_every_section_of_the_lists_is_used():
    used = [host.unsupported for host in HOST.values()] + [host.no_effect for host in HOST.values()]
    for section in (*NO_EFFECT.values(), *UNSUPPORTED.values()):
        assert any(section is item for item in used)
    assert JobConfig in HOST


def host_defaults() -> dict[tuple[str, str], object]:
    """(class, key) -> default, read from the text of the host's config_modules.py; ... for a computed default."""
    root = os.environ.get("AI_TOOLKIT_ROOT")
    if not root:
        pytest.skip("AI_TOOLKIT_ROOT is not set")
    version = (Path(root) / "version.py").read_text(encoding="utf-8")
    if HOST_VERSION not in version:
        pytest.skip(f"the checkout is not {HOST_VERSION}: {version.strip()}")
    tree = ast.parse((Path(root) / "toolkit" / "config_modules.py").read_text(encoding="utf-8"))
    found: dict[tuple[str, str], object] = {}
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef) and cls.name in HOST_CLASSES:
            for call in ast.walk(cls):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "kwargs.get":
                    found.setdefault((cls.name, ast.literal_eval(call.args[0])), _literal(call.args[1:]))
    return found


def _literal(args: list[ast.expr]) -> object:
    try:
        return ast.literal_eval(args[0]) if args else None
    except ValueError:
        return ...


@pytest.mark.aitk
def test_every_key_of_the_host_is_ours_or_listed():
    defaults = host_defaults()
    assert len(defaults) > 200
    missing = []
    for name, key in defaults:
        cls = HOST_CLASSES[name]
        lists = HOST.get(cls)
        known = {*config_fields(cls), *(lists.no_effect if lists else ()), *(lists.unsupported if lists else ())}
        if key not in known:
            missing.append(f"{name}.{key}")
    assert missing == []


@pytest.mark.aitk
def test_defaults_are_the_host_s():
    different = []
    for (name, key), default in host_defaults().items():
        cls = HOST_CLASSES[name]
        if default is ... or (name, key) in OTHER_DEFAULTS:
            continue
        if key in config_fields(cls):
            ours = _our_default(cls, key)
        elif cls in HOST and key in HOST[cls].unsupported:
            ours = HOST[cls].unsupported[key]
        else:
            continue
        if ours != default and (ours or default):
            different.append((f"{name}.{key}", default, ours))
    assert different == [
        ("NetworkConfig.linear", None, 4),  # the host's 4 stands in an else branch
        ("NetworkConfig.alpha", 1.0, None),  # ignored on FLUX: alpha is the rank
        ("TrainConfig.ema_config", None, {"use_ema": False}),
        ("DatasetConfig.resolution", 512, (512,)),
    ]


def _our_default(cls: type, key: str) -> object:
    item = config_fields(cls)[key]
    if "option" in item.metadata:
        return item.metadata["option"].default
    return {"use_ema": False} if key == "ema_config" else None
