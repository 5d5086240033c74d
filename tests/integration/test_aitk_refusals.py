"""What a job of our type refuses, and how it ends in a host that does not fit; other jobs run on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coat_flux.base.errors import UserError
from coat_flux.config.findings import ConfigError
from tests.helpers.aitk_standin.host import (  # noqa: F401
    COAT_ENTRY,
    PACKAGE,
    VERSION,
    Host,
    copy_checkout,
    make_entry,
    standin_host,
)

AT = r"config\.process\[0\]\."
REFUSED = {
    "unknown key of ours": ({"coat": {"enabeld": True}}, r"coat\.enabeld: unknown key; did you mean 'enabled'\?"),
    "unknown key of the host": ({"save": {"save_evry": 3}}, r"save\.save_evry.*save_every"),
    "no GPU": ({"device": "cuda"}, r"device='cuda': .*, so the run would be on the CPU; "),
    "another model": (
        {"model": {**COAT_ENTRY["model"], "name_or_path": "photos", "is_flux": True}},
        r"model\.name_or_path='photos': no such folder or file",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_setting_is_refused_before_the_model_loads(host: Host, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, message = REFUSED[name]
    loaded = []
    module = host.load("jobs.process.BaseSDTrainProcess")
    monkeypatch.setattr(module, "FluxTransformer2DModel", lambda: loaded.append("model"))
    monkeypatch.setattr(sys, "argv", ["run.py", "configs/mine.yaml"])
    with pytest.raises(ConfigError, match=rf"(?m)^configs/mine\.yaml: {AT}{message}"):
        host.run(**{**COAT_ENTRY, **change})
    assert loaded == []


def test_processes_that_do_not_know_of_each_other_are_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="ACCELERATE_USE_CPU"):
        host.run(**COAT_ENTRY)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError, match="DeepSpeed"):
        host.run(**COAT_ENTRY)


def test_surprises_are_printed(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.edit("version.py", VERSION, "0.13.0")
    host.run(train={"optimizer": "adamw", "lr": 0.1})
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[coat] note: ")]
    assert any("config.process[0].train.lr" in note for note in notes)
    assert any("ai-toolkit 0.13.0 is not tested with COAT-FLUX" in note for note in notes)


BROKEN = {
    "hook": (
        "jobs/process/BaseSDTrainProcess.py",
        "hook_after_model_load",
        "hook_model_is_there",
        "DiffusionTrainer has no hook_after_model_load",
    ),
    "optimizer parameters": (
        "toolkit/optimizer.py",
        "optimizer_params=None",
        "options=None, optimizer_params=None",
        "toolkit.optimizer.get_optimizer takes",
    ),
    "optimizer binding": (
        "jobs/process/BaseSDTrainProcess.py",
        "from toolkit.optimizer import get_optimizer",
        "import toolkit.optimizer\n\ndef get_optimizer(*args):\n    return toolkit.optimizer.get_optimizer(*args)\n",
        "jobs.process.BaseSDTrainProcess does not use toolkit.optimizer.get_optimizer",
    ),
    "weight backend": (
        "toolkit/util/ostris_quant.py",
        "    def requantize_(self, module, weight):\n        raise NotImplementedError\n",
        "",
        "OstrisQuantizer has no requantize_",
    ),
    "LoRA names": (
        "toolkit/lora_special.py",
        '["Linear", "OstrisLinear"]',
        '["Linear"]',
        "toolkit.lora_special.LINEAR_MODULES does not list OstrisLinear",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_host_that_does_not_fit(host: Host, name: str) -> None:
    file, old, new, piece = BROKEN[name]
    host.edit(file, old, new)
    with pytest.raises(RuntimeError) as raised:
        host.run(**COAT_ENTRY)
    assert str(raised.value).startswith(f"COAT-FLUX cannot run in ai-toolkit {VERSION}: ")
    assert piece in str(raised.value)
    process = host.run("sd_trainer", train={"optimizer": "adamw"})
    assert len(process.losses) == 3


def test_host_without_a_trainer_to_extend(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.start()
    for name in ("DiffusionTrainer", "SDTrainer"):
        monkeypatch.setitem(sys.modules, f"extensions_built_in.sd_trainer.{name}", None)
    process = host.load("extensions.coat_flux").AI_TOOLKIT_EXTENSIONS[0].get_process()(0, None, {})
    with pytest.raises(RuntimeError, match=rf"^COAT-FLUX cannot run in ai-toolkit {VERSION}: its trainer "):
        process.run()


def test_lora_that_finds_nothing_ends_the_run(host: Host) -> None:
    host.edit("jobs/process/BaseSDTrainProcess.py", '("blocks",)', '("nothing",)')
    host.edit("jobs/process/BaseSDTrainProcess.py", "self.network.force_to(torch.float32)", "")
    with pytest.raises(RuntimeError, match="the LoRA network found no linear to train"):
        host.run(**COAT_ENTRY)


# -- a folder that was only copied or linked -------------------------------------------------------------------------

HIDE_PIP = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in ("coat_core", "coat_flux"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


def _run_without_pip(root: Path, kind: str, **blocks: Any) -> subprocess.CompletedProcess[str]:
    """Run a job in an interpreter in which COAT-FLUX is not installed."""
    entry = root / "entry.json"
    entry.write_text(json.dumps(make_entry(root, kind, **blocks)))
    code = f"{HIDE_PIP}\nimport runpy\nsys.argv = ['run.py', {str(entry)!r}]\n"
    code += f"runpy.run_path({str(root / 'run.py')!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)


def _standin(tmp_path: Path, how: str) -> Path:
    root = copy_checkout(tmp_path / "ait")
    target = root / "extensions" / "coat_flux"
    if how == "link":
        target.symlink_to(PACKAGE, target_is_directory=True)
    else:
        shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_linked_folder_needs_no_pip(tmp_path: Path) -> None:
    done = _run_without_pip(_standin(tmp_path, "link"), "coat_flux_trainer")
    assert done.returncode == 0, done.stderr
    assert "[coat] FP8 weights: 0 linears at load, 4 after it" in done.stdout


def test_copied_folder_says_what_to_run_and_other_jobs_do_not_notice(tmp_path: Path) -> None:
    root = _standin(tmp_path, "copy")
    plain = _run_without_pip(root, "sd_trainer")
    assert plain.returncode == 0, plain.stderr
    assert "coat" not in plain.stdout + plain.stderr
    ours = _run_without_pip(root, "coat_flux_trainer")
    assert ours.returncode == 1
    assert f"COAT-FLUX cannot run in ai-toolkit {VERSION}: coat_core cannot be imported" in ours.stderr
    assert f"{sys.executable} -m pip install --no-deps" in ours.stderr


def test_extension_that_cannot_start_is_left_out(tmp_path: Path) -> None:
    root = _standin(tmp_path, "copy")
    (root / "extensions" / "coat_flux" / "trainers" / "ai_toolkit" / "extension.py").write_text("raise OSError('disk')")
    done = _run_without_pip(root, "sd_trainer")
    assert done.returncode == 0, done.stderr
    assert "COAT-FLUX could not start and is left out" in done.stderr
