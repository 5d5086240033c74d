"""The extension in a stand-in of ai-toolkit's interface (tests/helpers/aitk_standin): names, folders, whole jobs."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import coat_flux
from coat_core.config import FP8LinearConfig
from coat_core.optim import FP8AdamW
from coat_flux.base.errors import UserError
from coat_flux.config.findings import ConfigError
from coat_flux.trainers.ai_toolkit.install import MANIFEST, InstallError, install
from tests import tolerances
from tests.helpers.aitk_standin.host import (  # noqa: F401
    CHECKOUT,
    COAT_ENTRY,
    PACKAGE,
    REPOSITORY,
    VERSION,
    Host,
    Patch,
    both_hosts,
    copy_checkout,
    make_entry,
    standin_host,
)
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise, assert_sqnr


# -- identity and import ---------------------------------------------------------------------------------------------
def test_host_finds_one_extension_and_no_second_copy_of_our_modules(host):
    assert host.load("extensions.coat_flux").AI_TOOLKIT_EXTENSIONS == []  # outside of ai-toolkit
    del sys.modules["extensions.coat_flux"]
    classes = host.start()
    facade = sys.modules["extensions.coat_flux"]
    assert [extension.uid for extension in facade.AI_TOOLKIT_EXTENSIONS] == ["coat_flux_trainer"]
    assert "coat_flux.trainers.ai_toolkit.process" not in sys.modules  # other jobs need not import it
    trainer = host.load("coat_flux.trainers.ai_toolkit.process").CoatFluxTrainer
    assert issubclass(trainer, classes["diffusion_trainer"])
    assert facade.COATConfig is coat_flux.COATConfig
    assert [name for name in sys.modules if name.startswith("extensions.coat_flux.")] == []


# -- the optimizer name ----------------------------------------------------------------------------------------------
HOLDERS = ("toolkit.optimizer", "jobs.process.BaseSDTrainProcess", "late")  # of the name


def _bound() -> list[Any]:
    return [vars(sys.modules[name])["get_optimizer"] for name in HOLDERS]


def test_optimizer_name_works_wherever_it_was_bound_and_others_reach_the_host_untouched(host):
    calls: list[tuple] = []

    def original(params: Any, optimizer_type: str = "adam", learning_rate: float = 1e-6, optimizer_params: Any = None):
        calls.append((params, optimizer_type, learning_rate, optimizer_params))

    (host.root / "late.py").write_text("from toolkit.optimizer import get_optimizer\n")
    for name in HOLDERS:
        vars(host.load(name))["get_optimizer"] = original
    host.start()
    wrapper = _bound()[0]
    assert _bound() == [wrapper] * 3
    params = [torch.nn.Parameter(torch.ones(4, 32))]
    options = {"block_size": 32, "eps": 1e-7}
    built = wrapper(params, "coat_fp8_adamw", learning_rate=3e-4, optimizer_params=options)
    assert isinstance(built, FP8AdamW)
    assert built.fp8_config.block_size == 32
    assert (built.param_groups[0]["lr"], built.param_groups[0]["eps"]) == (3e-4, 1e-7)
    call = (params, "adamw8bit", 1e-4, {"weight_decay": 0.1})
    wrapper(*call[:2], learning_rate=call[2], optimizer_params=call[3])
    assert calls == [call]
    assert calls[0][3] is call[3]

    sys.modules["late"].get_optimizer = original  # as if bound before the wrapper came
    for name in [name for name in sys.modules if name.startswith("coat_flux.trainers.ai_toolkit")]:
        del sys.modules[name]
    host.load("coat_flux.trainers.ai_toolkit.optimizer").install_optimizer()
    assert _bound() == [wrapper] * 3  # wrapped once, wherever it is bound


# -- the qtype -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("fmt", "granularity"), [("e4m3", "per_tensor"), ("e5m2", "per_row")])
def test_converted_linear_keeps_codes_through_casts_and_the_hosts_own_save(host, fmt, granularity):
    host.start()
    linear, twin = (torch.nn.Linear(256, 128, dtype=torch.bfloat16) for _ in range(2))
    torch.nn.init.normal_(linear.weight)
    twin.load_state_dict(linear.state_dict())
    config = FP8LinearConfig(weight_format=fmt, weight_granularity=granularity)
    host.load("coat_flux.trainers.ai_toolkit.quantizer").convert(torch.nn.Sequential(twin), ["0"], config)
    before = twin.weight_codes.clone(), twin.weight_scale_bits.clone()
    twin.to(torch.bfloat16).to(torch.float16).half().to(torch.bfloat16)
    assert_bitwise(twin.weight_codes, before[0])
    assert_bitwise(twin.weight_scale_bits, before[1])
    assert type(twin).__name__ == "OstrisLinear"
    assert [name for name, _ in twin.named_parameters()] == ["bias"]
    assert_sqnr(linear.weight, twin.weight, tolerances.UNIFORM_FLOOR_DB[fmt])
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    expected = twin(x)
    assert_sqnr(linear(x), expected, tolerances.AITK_FORWARD_FLOOR_DB[fmt])

    del twin.coat_linear_config  # the host's file holds buffers and plain attributes only
    twin.ostris_quantizer = host.load("toolkit.util.ostris_quant").get_ostris_quantizer("coat_fp8")
    assert_bitwise(twin(x), expected)
    assert twin.coat_linear_config.weight_format == fmt
    get_qtype = host.load("toolkit.util.quantize").get_qtype
    assert [get_qtype(name).qtype for name in ("half", "coat_fp8")] == ["half", "coat_fp8"]
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
        job = root / f"{kind}.json"
        job.write_text(json.dumps(make_entry(root, kind, **changes)))
        code += f"sys.argv = ['run.py', {str(job)!r}]\nrunpy.run_path({str(root / 'run.py')!r}, run_name='__main__')\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)


def test_linked_folder_needs_no_pip(tmp_path):
    root = copy_checkout(tmp_path / "ait")
    (root / "extensions" / "coat_flux").symlink_to(PACKAGE, target_is_directory=True)
    done = _run_without_pip(root, "coat_flux_trainer", coat={"enabeld": True})  # our trainer's own error
    assert (done.returncode, "coat.enabeld: " in done.stderr) == (1, True), done.stderr


def test_copied_folder_says_what_to_run_and_other_jobs_do_not_notice(tmp_path):
    root = copy_checkout(tmp_path / "ait")
    shutil.copytree(PACKAGE, root / "extensions" / "coat_flux", ignore=shutil.ignore_patterns("__pycache__"))
    both = _run_without_pip(root, "sd_trainer", "coat_flux_trainer")
    assert both.returncode == 1
    assert len(load_file(root / "out" / "standin_job" / "standin_job.safetensors")) > 0
    assert "coat" not in both.stdout
    assert f"COAT-FLUX cannot run in ai-toolkit {VERSION}: coat_core cannot be imported" in both.stderr
    assert f"{sys.executable} -m pip install --no-deps" in both.stderr


# -- whole jobs: what is trained -------------------------------------------------------------------------------------
BLOCK_LINEARS = {f"{kind}transformer_blocks.0.attn.{name}" for kind in ("", "single_") for name in ("to_q", "to_k")}
PHASES = ["before_forward", *2 * ["after_forward", "after_backward"], "after_optimizer_step"]
PLAIN: dict[str, Any] = {"train": {"optimizer": "adamw"}}


def _spy(host: Host, monkeypatch: Patch) -> dict[str, Any]:
    """Record what the model and the LoRA are made of when training begins."""
    seen: dict[str, Any] = {}
    host.start()
    trainer = host.load("coat_flux.trainers.ai_toolkit.process").CoatFluxTrainer
    converted_linears = host.load("coat_flux.trainers.ai_toolkit.quantizer").converted_linears
    begin, accumulate = trainer.hook_before_train_loop, trainer._accumulate
    seen["scales"] = set()

    def accumulating(self: Any, batch: Any, accum_scale: float = 1.0) -> Any:
        seen["scales"].add(accum_scale)
        return accumulate(self, batch, accum_scale)

    def look(self: Any) -> None:
        encoders, linears = (converted_linears(model) for model in (self.sd.text_encoder[0], self.sd.unet))
        seen["converted"] = {name for name, module in self.sd.unet.named_modules() if module in linears}
        seen["encoder_gemms"] = [module.coat_linear_config.use_fp8_gemm for module in encoders]
        seen["can_merge_in"] = self.network.can_merge_in
        seen["adapters"] = [type(lora.lora_down).__name__ for lora in self.network.unet_loras]
        begin(self)

    monkeypatch.setattr(trainer, "hook_before_train_loop", look)
    monkeypatch.setattr(trainer, "_accumulate", accumulating)
    return seen


@both_hosts
@pytest.mark.parametrize("at_load", [True, False])
def test_job_trains_in_fp8(host, monkeypatch, capsys, at_load):
    seen = _spy(host, monkeypatch)
    entry = {**COAT_ENTRY, "model": COAT_ENTRY["model"] if at_load else {}, "coat": {"memory": {"log_every": 2}}}
    entry["train"] = {**COAT_ENTRY["train"], "gradient_accumulation": 2}
    began = time.monotonic()
    process = host.run(**entry)
    elapsed = time.monotonic() - began
    assert seen["converted"] == BLOCK_LINEARS
    assert seen["encoder_gemms"] == ([False] if at_load else [])
    assert seen["can_merge_in"] is False
    assert seen["adapters"] == ["FP8InputLinear"] * 4
    assert seen["scales"] == {0.5 if host.load("version").IS_NEWER else 1.0}
    assert len(process.losses) == 3
    assert "backward" not in vars(process.accelerator)  # which other jobs of the command share
    assert "calculate_loss" not in vars(process)
    state = host.optimizer()["state"][1]
    assert state["exp_avg_codes"].dtype == state["exp_avg_sq_codes"].dtype == torch.float8_e4m3fn
    assert state["exp_avg_codes"].view(torch.uint8).any()
    with (host.save_folder / "coat" / "metrics.csv").open(encoding="utf-8") as file:
        seconds = [float(row["s_per_it"]) for row in csv.DictReader(file)]
    assert len(seconds) == 3
    assert 0 < sum(seconds) < elapsed
    printed = capsys.readouterr().out
    assert "[coat] FP8 weights: {} linears at load, {} after it".format(*((4, 0) if at_load else (0, 4))) in printed
    assert "Allocated" not in printed
    lines = [line[21:] for line in (host.save_folder / "coat" / "log.txt").read_text(encoding="utf-8").splitlines()]
    assert [line[1:].split("]")[0] for line in lines if "Allocated" in line and "Step" in line] == PHASES
    assert all("Step 2:" in line for line in lines if "] Step" in line)
    assert any("outside the blocks: kept in high precision" in line for line in lines)
    assert any("LoRA inputs in FP8: 4 shared with their base linear" in line for line in lines)


def test_fp8_gemms_without_fp8_weights_still_get_adapters(host, monkeypatch):
    seen = _spy(host, monkeypatch)
    host.run(train=COAT_ENTRY["train"], coat={"weight": {"use_fp8": False}})
    assert (seen["converted"], len(seen["adapters"])) == (set(), 4)


def test_disabled_is_the_hosts_own_run_which_is_the_same_without_the_extension(host):
    host.run(**PLAIN, coat={"enabled": False})
    assert not (host.save_folder / "coat").exists()
    host.run("sd_trainer", training_folder=str(host.root / "beside"), **PLAIN)
    (host.root / "extensions" / "coat_flux").unlink()
    original = host.load("toolkit.optimizer").get_optimizer._coat_flux_original
    for module in ("toolkit.optimizer", "jobs.process.BaseSDTrainProcess"):
        host.load(module).get_optimizer = original
    host.run("sd_trainer", training_folder=str(host.root / "without"), **PLAIN)
    expected = host.lora("without")
    for folder in ("out", "beside"):
        assert_all_bitwise(host.lora(folder), expected)
    assert host.optimizer()["state"][1]["exp_avg"].dtype == torch.float32


def test_config_of_a_job_does_not_reach_the_next_which_says_in_one_line_each_what_is_in_force(host, capsys):
    host.run(**COAT_ENTRY, coat={"optimizer": {"block_size": 32}})
    assert host.optimizer()["param_groups"][0]["fp8"]["block_size"] == 32
    assert "qtype coat_fp8: " not in capsys.readouterr().out  # a table says it
    host.run("sd_trainer", training_folder=str(host.root / "one"), **COAT_ENTRY)
    assert host.optimizer("one")["param_groups"][0]["fp8"]["block_size"] == 128
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[coat]")]
    linears = sum(1 for name in host.lora("one") if "lora_A" in name) + 3  # around the blocks, and in the text encoder
    assert len(lines) == 2
    assert lines[0].startswith(f"[coat] qtype coat_fp8: {linears} linears hold FP8, W e4m3/per_tensor")
    assert lines[1].startswith("[coat] optimizer coat_fp8_adamw: ")
    host.run("sd_trainer", training_folder=str(host.root / "two"), **PLAIN)
    assert "[coat]" not in capsys.readouterr().out


# -- the optimizer of a resume ---------------------------------------------------------------------------------------
def test_failed_resume_ends_the_run(host, monkeypatch, capsys):
    def refuse(self: Any, state: Any) -> None:
        raise ValueError("exp_avg: other shape")

    host.run(**COAT_ENTRY)
    with monkeypatch.context() as patch:
        patch.setattr(FP8AdamW, "load_state_dict", refuse)
        with pytest.raises(RuntimeError, match=r"optimizer\.pt could not be loaded \(exp_avg: other shape\)"):
            host.run(**COAT_ENTRY)
    assert "[coat] ERROR: " in capsys.readouterr().out
    monkeypatch.setattr(host.load("jobs.process.BaseSDTrainProcess").BaseSDTrainProcess, "_load_optimizer", lambda _: 0)
    with pytest.raises(RuntimeError, match=r"did not load it; .*pretrained_lora_path"):
        host.run(**COAT_ENTRY)


# -- what is refused -------------------------------------------------------------------------------------------------
PROCESS = "jobs/process/BaseSDTrainProcess.py"


def test_setting_is_refused_before_the_model_loads(host, monkeypatch):
    module = host.load("jobs.process.BaseSDTrainProcess")
    monkeypatch.setattr(module, "FluxTransformer2DModel", lambda: pytest.fail("the model was loaded"))
    monkeypatch.setattr(sys, "argv", ["run.py", "configs/mine.yaml"])
    for change, message in (
        ({"coat": {"enabeld": True}}, r"coat\.enabeld: .*'enabled'"),
        ({"model": {**COAT_ENTRY["model"], "name_or_path": "photos"}}, r"model\.name_or_path='photos': "),
    ):
        with pytest.raises(ConfigError, match=rf"(?m)^configs/mine\.yaml: config\.process\[0\]\.{message}"):
            host.run(**{**COAT_ENTRY, **change})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="ACCELERATE_USE_CPU"):
        host.run(**COAT_ENTRY)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError, match="DeepSpeed"):
        host.run(**COAT_ENTRY)


CONVERT = "convert_linear_to_ostris(module, weights)"


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("toolkit/util/quantize.py", CONVERT, "raise MemoryError('no room')", "qtype coat_fp8 converted no linear"),
        (PROCESS, '("blocks",)', '("nothing",)', "only_if_contains"),
    ],
)
def test_what_the_host_passes_over_ends_the_run(host, file, old, new, says):
    host.edit(file, old, new)
    host.edit(PROCESS, "self.network.force_to(torch.float32)", "")
    with pytest.raises(RuntimeError, match=says):
        host.run(**COAT_ENTRY)


def test_surprises_are_printed(host, capsys):
    host.edit("version.py", VERSION, "0.13.0")
    host.run(train={"optimizer": "adamw", "lr": 0.1})
    notes = "\n".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("[coat] note: "))
    assert ["config.process[0].train.lr" in notes, "0.13.0" in notes] == [True, True]


# what misfits → file of the host, text there, what is there instead, the piece that the error names
OPTIMIZER = "toolkit/optimizer.py"
BINDING = "from toolkit import optimizer\n\ndef get_optimizer(*args):\n    return optimizer.get_optimizer(*args)\n"
EXTRA = "before_dataset_load = lambda self, model=None: None\n    ensure_params_requires_grad = "
BROKEN = {
    "hook": (PROCESS, "hook_after_model_load", "hook_model_is_there", "DiffusionTrainer has no hook_after_model_load"),
    "optimizer parameters": (OPTIMIZER, "optimizer_params", "options", "toolkit.optimizer.get_optimizer takes"),
    "optimizer binding": (PROCESS, "from toolkit.optimizer import get_optimizer", BINDING, "does not use toolkit.opt"),
    "LoRA names": ("toolkit/lora_special.py", ', "OstrisLinear"]', "]", "LINEAR_MODULES does not list OstrisLinear"),
    "LoRA modules": ("toolkit/lora_special.py", "lora_down", "lora_A", "toolkit/lora_special.py, line 12 has no"),
    "argument of an override": (PROCESS, "ensure_params_requires_grad = ", EXTRA, "dataset_load also takes model"),
    "key of a config": (PROCESS, "merge_network_on_save=False", "merges=False", "train_config.merge_network_on_save"),
    "data sets": ("toolkit/data.py", "self.file_list", "self.files", "FolderDataset has no file_list"),
    "average": ("toolkit/ema.py", "shadow_params", "averages", "ema has no shadow_params"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_host_that_does_not_fit(host, name):
    file, old, new, piece = BROKEN[name]
    host.edit(file, old, new)
    average = {"ema_config": {"use_ema": True, "ema_decay": 0.9}}
    with pytest.raises(RuntimeError) as raised:
        host.run(**{**COAT_ENTRY, "train": {**COAT_ENTRY["train"], **average}})
    assert str(raised.value).startswith(f"COAT-FLUX cannot run in ai-toolkit {VERSION}: ")
    assert piece in str(raised.value)
    assert len(host.run("sd_trainer", **PLAIN).losses) == 3


def test_host_without_a_trainer_to_extend(host, monkeypatch, caplog, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "coat_flux.trainers.ai_toolkit.extension", None)
        assert "coat_flux_trainer" not in host.start()
    assert "COAT-FLUX could not start and is left out" in caplog.text + "".join(capsys.readouterr())
    del sys.modules["extensions.coat_flux"]
    host.start()
    for name in ("DiffusionTrainer", "SDTrainer"):
        monkeypatch.setitem(sys.modules, f"extensions_built_in.sd_trainer.{name}", None)
    process = host.load("extensions.coat_flux").AI_TOOLKIT_EXTENSIONS[0].get_process()(0, None, {})
    with pytest.raises(RuntimeError, match=rf"^COAT-FLUX cannot run in ai-toolkit {VERSION}: its trainer "):
        process.run()


# -- `coat-flux install` ----------------------------------------------------------------------------------------------
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
EXTENSION = Path("extensions") / "coat_flux"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "ait")


def _contents(root: Path) -> dict[str, str | bytes]:
    """Every path below `root`: a link's target, a file's bytes, or "folder"."""
    contents: dict[str, str | bytes] = {}
    for path in root.rglob("*"):
        key = path.relative_to(root).as_posix()
        if path.is_symlink():
            contents[key] = os.readlink(path)
        else:
            contents[key] = "folder" if path.is_dir() else path.read_bytes()
    return contents


def test_links_extension_configs_and_images_and_undo_leaves_the_checkout_as_it_was(checkout):
    before = _contents(checkout)
    assert install(checkout)[0] == "extensions/coat_flux: link made"
    assert (checkout / EXTENSION).resolve() == PACKAGE
    assert CONFIGS
    for config in CONFIGS:
        assert (checkout / "configs" / config.name).resolve() == config
    clothing = checkout / "datasets_example" / "clothing"
    captions = sorted((REPOSITORY / "datasets_example" / "clothing").glob("*.txt"))
    assert [path.resolve() for path in sorted(clothing.glob("*.txt"))] == captions
    assert not clothing.is_symlink()
    installed = _contents(checkout)
    assert all("already there" in line for line in install(checkout))
    assert _contents(checkout) == installed
    made = len(json.loads((checkout / MANIFEST).read_text())["made"])
    assert install(checkout, undo=True) == [f"removed {made} of {made} entries"]
    assert _contents(checkout) == before
    assert install(checkout, undo=True)[0].startswith("nothing to undo")


def test_without_the_right_to_link_files_are_copied_and_those_of_the_user_left_alone(checkout, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("a required privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    before = _contents(checkout)
    assert install(checkout)[0] == "extensions/coat_flux: copy made"
    copied, original = checkout / EXTENSION / "__init__.py", (PACKAGE / "__init__.py").read_text()
    assert copied.read_text() == original
    assert all("already there" in line for line in install(checkout))
    copied.write_text("old version")
    install(checkout)
    assert copied.read_text() == original
    install(checkout, undo=True)
    assert _contents(checkout) == before
    own, edited = (checkout / "configs" / config.name for config in CONFIGS[:2])
    own.parent.mkdir()
    own.write_text("mine")
    assert any(line.startswith(f"configs/{own.name}: left alone") for line in install(checkout))
    edited.write_text("edited")
    cache = checkout / "datasets_example" / "clothing" / ".aitk_size.json"
    cache.write_text("{}")
    assert any(line.startswith(f"configs/{edited.name}: left") for line in install(checkout, undo=True))
    assert {path.name: path.read_text() for path in own.parent.iterdir()} == {own.name: "mine", edited.name: "edited"}
    assert cache.exists()
    assert not (checkout / EXTENSION).exists()


def test_a_foreign_extension_folder_or_checkout_is_refused(checkout, tmp_path):
    shutil.copytree(CHECKOUT / "jobs", checkout / EXTENSION)
    before = _contents(checkout)
    with pytest.raises(InstallError, match="extensions/coat_flux was not made by coat-flux"):
        install(checkout)
    assert _contents(checkout) == before
    (tmp_path / "run.py").write_text("")
    with pytest.raises(InstallError, match=r"toolkit/extension\.py, extensions missing"):
        install(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"run.py", "ait"}
