"""The ai-toolkit extension in a stand-in of ai-toolkit's interface (tests/helpers/aitk_standin): names and folders."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import tolerances
from tests.helpers.aitk_standin.host import (  # noqa: F401
    PACKAGE,
    VERSION,
    Host,
    Patch,
    Printed,
    copy_checkout,
    make_entry,
    standin_host,
)
from tests.helpers.asserts import assert_bitwise, assert_sqnr

# -- identity and import ---------------------------------------------------------------------------------------------


def test_host_finds_one_extension_and_no_second_copy_of_our_modules(host: Host) -> None:
    classes = host.start()
    import coat_flux

    facade = sys.modules["extensions.coat_flux"]
    assert [extension.uid for extension in facade.AI_TOOLKIT_EXTENSIONS] == ["coat_flux_trainer"]
    assert "coat_flux.trainers.ai_toolkit.process" not in sys.modules  # other jobs need not import it
    trainer = host.load("coat_flux.trainers.ai_toolkit.process").CoatFluxTrainer
    assert issubclass(trainer, classes["diffusion_trainer"])
    assert facade.COATConfig is coat_flux.COATConfig
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("extensions.coat_flux.config")
    assert [name for name in sys.modules if name.startswith("extensions.coat_flux.")] == []


def test_outside_the_host_the_folder_is_no_extension(host: Host) -> None:
    assert host.load("extensions.coat_flux").AI_TOOLKIT_EXTENSIONS == []


# -- the optimizer name ----------------------------------------------------------------------------------------------


HOLDERS = ("toolkit.optimizer", "jobs.process.BaseSDTrainProcess", "late")  # of the name


@pytest.fixture(name="hosted")
def host_with_another_user_of_the_name(host: Host) -> Host:
    (host.root / "late.py").write_text("from toolkit.optimizer import get_optimizer\n")
    for name in HOLDERS:
        host.load(name)
    return host


def _bound() -> list[Any]:
    return [vars(sys.modules[name])["get_optimizer"] for name in HOLDERS]


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 32))]


def test_optimizer_name_works_wherever_it_was_bound(hosted: Host) -> None:
    from coat_core.optim import FP8AdamW

    hosted.start()
    bound = _bound()
    assert bound[0] is bound[1] is bound[2]
    options = {"block_size": 32, "eps": 1e-7}
    built = bound[1](_parameters(), "coat_fp8_adamw", learning_rate=3e-4, optimizer_params=options)
    assert isinstance(built, FP8AdamW)
    assert built.fp8_config.block_size == 32
    assert (built.param_groups[0]["lr"], built.param_groups[0]["eps"]) == (3e-4, 1e-7)


def test_other_optimizer_names_reach_the_host_untouched(hosted: Host) -> None:
    calls: list[tuple] = []

    def original(params: Any, optimizer_type: str = "adam", learning_rate: float = 1e-6, optimizer_params: Any = None):
        calls.append((params, optimizer_type, learning_rate, optimizer_params))
        return original

    for module in HOLDERS:
        vars(sys.modules[module])["get_optimizer"] = original
    hosted.start()
    params, own = _parameters(), {"weight_decay": 0.1}
    assert _bound()[2](params, "adamw8bit", learning_rate=1e-4, optimizer_params=own) is original
    assert calls == [(params, "adamw8bit", 1e-4, own)]
    assert calls[0][3] is own


def test_installing_twice_wraps_once_and_reaches_modules_loaded_later(hosted: Host) -> None:
    hosted.start()
    wrapper, late = _bound()[0], sys.modules["late"]
    late.get_optimizer = wrapper._coat_flux_original  # as if bound before the wrapper came
    for name in [name for name in sys.modules if name.startswith("coat_flux.trainers.ai_toolkit")]:
        del sys.modules[name]
    hosted.load("coat_flux.trainers.ai_toolkit.optimizer").install_optimizer()
    assert _bound() == [wrapper] * 3
    assert not hasattr(wrapper._coat_flux_original, "_coat_flux_original")


# -- the qtype -------------------------------------------------------------------------------------------------------


def _converted(host: Host, **options: Any) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    from coat_core.config import FP8LinearConfig

    host.start()
    linear, twin = (torch.nn.Linear(256, 128, dtype=torch.bfloat16) for _ in range(2))
    torch.nn.init.normal_(linear.weight)
    twin.load_state_dict(linear.state_dict())
    host.load("coat_flux.trainers.ai_toolkit.quantizer").convert(
        torch.nn.Sequential(twin), ["0"], FP8LinearConfig(**options)
    )
    return linear, twin


@pytest.mark.parametrize(("fmt", "granularity"), [("e4m3", "per_tensor"), ("e5m2", "per_row")])
def test_converted_linear_keeps_codes_through_casts(host: Host, fmt: str, granularity: str) -> None:
    linear, twin = _converted(host, weight_format=fmt, weight_granularity=granularity)
    before = twin.weight_codes.clone(), twin.weight_scale_bits.clone()
    twin.to(torch.bfloat16).to(torch.float16).half().to(torch.bfloat16)
    assert_bitwise(twin.weight_codes, before[0])
    assert_bitwise(twin.weight_scale_bits, before[1])
    assert type(twin).__name__ == "OstrisLinear"
    assert [name for name, _ in twin.named_parameters()] == ["bias"]
    assert_sqnr(linear.weight, twin.weight, tolerances.UNIFORM_FLOOR_DB[fmt])
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    assert_sqnr(linear(x), twin(x), tolerances.AITK_FORWARD_FLOOR_DB[fmt])


def test_quantizer_restores_what_the_hosts_own_save_keeps(host: Host) -> None:
    _, twin = _converted(host, weight_format="e5m2", weight_granularity="per_row")
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    expected = twin(x)
    del twin.coat_linear_config  # the host's file holds buffers and plain attributes only
    twin.ostris_quantizer = host.load("toolkit.util.ostris_quant").get_ostris_quantizer("coat_fp8")
    assert_bitwise(twin(x), expected)
    assert twin.coat_linear_config.weight_format == "e5m2"


def test_other_qtypes_reach_the_host_untouched(host: Host) -> None:
    host.start()
    get_qtype = host.load("toolkit.util.quantize").get_qtype
    assert get_qtype("half").qtype == "half"
    assert get_qtype("coat_fp8").qtype == "coat_fp8"
    with pytest.raises(KeyError, match="nonsense"):
        get_qtype("nonsense")


# -- a folder that was only copied or linked -------------------------------------------------------------------------

HIDE_PIP = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in ("coat_core", "coat_flux"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


def _run_without_pip(root: Path, *kinds: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run a job of each type, one after the other, in an interpreter in which COAT-FLUX is not installed."""
    code = f"{HIDE_PIP}\nimport runpy\n"
    for kind in kinds:
        entry = root / f"{kind}.json"
        entry.write_text(json.dumps(make_entry(root, kind, **changes)))
        code += (
            f"sys.argv = ['run.py', {str(entry)!r}]\nrunpy.run_path({str(root / 'run.py')!r}, run_name='__main__')\n"
        )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)


def test_linked_folder_needs_no_pip(tmp_path: Path) -> None:
    root = copy_checkout(tmp_path / "ait")
    (root / "extensions" / "coat_flux").symlink_to(PACKAGE, target_is_directory=True)
    done = _run_without_pip(root, "coat_flux_trainer", coat={"enabeld": True})  # our trainer's own error
    assert (done.returncode, "coat.enabeld: " in done.stderr) == (1, True), done.stderr


def test_copied_folder_says_what_to_run_and_other_jobs_do_not_notice(tmp_path: Path) -> None:
    root = copy_checkout(tmp_path / "ait")
    shutil.copytree(PACKAGE, root / "extensions" / "coat_flux", ignore=shutil.ignore_patterns("__pycache__"))
    both = _run_without_pip(root, "sd_trainer", "coat_flux_trainer")
    assert both.returncode == 1
    assert len(load_file(root / "out" / "standin_job" / "standin_job.safetensors")) > 0
    assert "coat" not in both.stdout
    assert f"COAT-FLUX cannot run in ai-toolkit {VERSION}: coat_core cannot be imported" in both.stderr
    assert f"{sys.executable} -m pip install --no-deps" in both.stderr


def test_extension_that_cannot_start_is_left_out(
    host: Host, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, capsys: Printed
) -> None:
    monkeypatch.setitem(sys.modules, "coat_flux.trainers.ai_toolkit.extension", None)
    assert "coat_flux_trainer" not in host.start()
    assert "COAT-FLUX could not start and is left out" in caplog.text + "".join(capsys.readouterr())
