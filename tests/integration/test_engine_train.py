"""The stand-alone trainer on the embedded model: output folder, resume, EMA, samples, held-out photos, W&B."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from coat_flux.blocks.lora import LokrLinear, lokr_shapes, split_width
from coat_flux.blocks.streaming import StreamedWeights
from coat_flux.config.findings import ConfigError
from coat_flux.pages.run import RunFolder
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import optimizer_bytes
from coat_flux.saves.commit import newest_set
from coat_flux.saves.errors import ResumeError
from coat_flux.trainers.standalone import session
from coat_flux.trainers.standalone.flow_matching import Objective
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.guard import DeadRunError
from coat_flux.watch.live import read_status
from tests import tolerances
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.helpers.engine_job import FEW_LINEARS, TRIGGER, engine_job, losses, rows, train
from tests.helpers.step_watch import set_limits
from tests.integration.test_optimizers import state_bytes
from tests.reliability.forks import fork, wait


@pytest.fixture(scope="module")
def four(place: dict[str, Path]) -> Path:
    """The LoRA of four steps, which several tests look at, or resume a copy of."""
    settings = {"steps": 4, "lr_scheduler": "cosine"}
    return train("four", place, train=settings, save={"save_every": 1, "max_step_saves_to_keep": 2})


@pytest.fixture
def copied(four: Path, place: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    shutil.copytree(four.parent, tmp_path / "out" / "four")
    return {**place, "out": tmp_path / "out"}


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from coat_flux.cli.entry import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_machine_without_triton_trains(place, tmp_path):
    """As most CPUs are: only our test dependencies bring triton there."""
    job = engine_job("bare", **place | {"out": tmp_path}, coat={}, train={"steps": 1}, network=FEW_LINEARS)
    config = tmp_path / "bare.yaml"
    config.write_text(json.dumps(job), encoding="utf-8")
    line = [sys.executable, "-c", WITHOUT_TRITON, "train", str(config)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


FURTHER = {"train": {"steps": 5, "lr_scheduler": "cosine"}}


def test_run_folder_lora_file_and_metrics(four):
    run = four.parent
    assert read_status(run)["takes"] == ["save", "stop"]
    loras = {"four.safetensors", "four_000000002.safetensors", "four_000000003.safetensors"}
    assert {path.name for path in run.iterdir()} == {*loras, "optimizer.pt", "config.yaml", "coat"}
    assert {path.name for path in (run / "coat").glob("state-*")} == {"state-000000003", "state-000000004"}
    assert not list(run.rglob(".writing-*"))
    tensors = load_file(four)
    assert len(tensors) == 80
    for name, tensor in tensors.items():
        assert re.fullmatch(r"transformer\.\S+\.lora_[AB]\.weight", name)
        assert tensor.dtype == torch.float16
        assert 0 < tensor.abs().max() < torch.inf, name

    table = [{key: float(value) for key, value in row.items()} for row in rows(run)]
    assert [row["step"] for row in table] == [1, 2, 3, 4]
    rates = [row["lr"] for row in table]
    assert rates[0] == 1e-3
    assert rates == sorted(set(rates), reverse=True)
    for row in table:
        assert 0 < row["loss"] < 10
        assert min(row["grad_norm"], row["s_per_it"], row["peak_memory_gb"] - 0.05) > 0

    with safe_open(four, framework="pt") as file:
        meta = file.metadata()
    assert (meta["format"], meta["ss_output_name"], meta["ss_base_model_version"]) == ("pt", "four", "flux.1")
    assert json.loads(meta["training_info"]) == {"step": 4, "epoch": 1}
    assert json.loads(meta["ss_tag_frequency"]) == {f"1_{TRIGGER}": {TRIGGER: 1}}
    assert json.loads(meta["coat"])["enabled"] is False


def test_a_finished_run_is_left_alone_and_one_with_more_steps_says_what_changed(copied, capsys):
    final = copied["out"] / "four" / "four.safetensors"
    before = final.stat().st_mtime_ns
    assert train("four", copied, train={"steps": 4, "lr_scheduler": "cosine"}) == final
    assert final.stat().st_mtime_ns == before
    assert "nothing is left to train" in capsys.readouterr().out
    train("four", copied, train={"steps": 5, "lr": 5e-4, "optimizer_params": {"weight_decay": 0.5}})
    out = capsys.readouterr().out
    assert f"#### IMPORTANT RESUMING FROM {final} ####" in out
    assert "weight_decay 0.01 -> 0.5" in out
    assert len(rows(final.parent)) == 5
    assert float(rows(final.parent)[-1]["lr"]) == 5e-4
    group = torch.load(final.parent / "optimizer.pt", weights_only=True)["param_groups"][0]
    assert (group["weight_decay"], group["eps"]) == (0.5, 1e-6)
    run, file = final.parent, "optimizer.pt"
    for folder in (run / "coat").glob("state-*"):
        (folder / file).write_bytes((folder / file).read_bytes()[:-20])
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError, match=rf"{file}.*restore it from a backup, or"):  # where no state is whole
        train("four", copied, **FURTHER)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_resume_from_an_ai_toolkit_save(copied, capsys):
    """The same folder, but without our own state: weights from the file, place in the data from its step."""
    other = {**copied, "out": copied["out"].with_name("host")}
    shutil.copytree(copied["out"], other["out"])
    shutil.rmtree(other["out"] / "four" / "coat")
    for path in (other["out"] / "four").glob("*_*.safetensors"):
        path.unlink()
    resumed = float(losses(train("four", other, **FURTHER).parent)[-1])
    assert "ai-toolkit's" in capsys.readouterr().out
    exact = float(losses(train("four", copied, **FURTHER).parent)[-1])
    assert resumed == pytest.approx(exact, rel=1e-2)
    assert resumed != exact
    final = other["out"] / "four" / "four.safetensors"
    final.write_bytes(b"not a safetensors file")
    for path in final.parent.glob("four_*.safetensors"):
        path.unlink()
    shutil.rmtree(final.parent / "coat")
    with pytest.raises(ResumeError, match=r"four\.safetensors: cannot be read"):
        train("four", other, train={"steps": 6})


def test_an_average_samples_recomputation_and_no_caches_change_no_bit_of_what_is_trained(place, four):
    sample = {"sample_every": 2, "prompts": ["[trigger] shirt", "a hat"], "walk_seed": True, "format": "png"}
    settings = {"steps": 4, "lr_scheduler": "cosine", "disable_sampling": False, "gradient_checkpointing": True}
    settings["ema_config"] = {"use_ema": True, "ema_decay": 0.9}
    off = {"cache_latents": False, "cache_text_embeddings": False}
    final = train("samples", place, train=settings, sample=sample, dataset=off)
    state = final.parent / "coat" / "state-000000004"
    assert losses(final.parent) == losses(four.parent)
    raw, average, saved = (load_file(path) for path in (state / "lora.safetensors", state / "ema.safetensors", final))
    assert_all_bitwise(raw, load_file(four.parent / "coat" / "state-000000004" / "lora.safetensors"))
    name = "transformer.transformer_blocks.0.attn.to_q.lora_B.weight"
    assert average[name].norm() < raw[name].norm()
    assert_bitwise(saved[name], average[name].half())

    assert read_status(final.parent)["takes"] == ["sample", "save", "stop"]
    pictures = {path.name: path.read_bytes() for path in sorted((final.parent / "samples").iterdir())}
    assert all(re.fullmatch(r"\d{13}__\d{9}_\d\.png", name) for name in pictures)
    names = [name.partition("__")[2] for name in pictures]
    assert names == [f"{step:09d}_{n}.png" for step in (0, 2, 4) for n in (0, 1)]
    assert len(set(pictures.values())) == 6


def test_photos_held_out_are_measured_and_leave_no_trace_in_a_run_or_its_resume(place, tmp_path, capsys):
    """The run is one without these photos, and resumes from a save as before; the loss is that of the average."""
    average = {"steps": 3, "lr": 0.1, "ema_config": {"use_ema": True, "ema_decay": 0.9}}
    asked = {"hold_out": ["1.png", "3.png"], "every": 1}
    noisy: dict[str, Any] = {
        "coat": {"optimizer": {"stochastic_rounding": True}, "memory": {"log_memory_stats": False}},
        "network": FEW_LINEARS | {"dropout": 0.1}, "dataset": {"num_repeats": 2, "flip_x": True},
    }  # fmt: skip
    blocks = {"train": average, "save": {"save_every": 2}, **noisy}
    held = train("held", place, validation=asked, **blocks)
    said = capsys.readouterr()
    fewer = shutil.copytree(place["images"], tmp_path / "fewer", ignore=shutil.ignore_patterns("1.*", "3.*", "_coat*"))
    lora = load_file(held)
    assert_all_bitwise(load_file(train("fewer", {**place, "images": fewer}, train=average, **noisy)), lora)

    log = (held.parent / "coat" / "log.txt").read_text(encoding="utf-8")
    assert re.search(r"network\.dropout: (\d) of \d blocks take the generic flow, which keeps \d+\.\d\d MB", log)
    assert log.count(".safetensors: loads in: ") == 2  # each save is read back
    found = RunFolder(held.parent).validation
    assert [step for step, _ in found] == [0, 1, 2, 3]
    assert len({loss for _, loss in found}) == 4
    step, loss = min(found, key=lambda point: point[1])
    names = {2: "held_000000002.safetensors", 3: "held.safetensors"}
    file = names.get(int(step), "not saved; the nearest is held_000000002.safetensors, step 2")
    assert f"lowest held-out loss {loss:.6f} at step {int(step)} ({file})" in said.out
    assert f"held-out: {found[2][1]:.3e}" in said.err  # the bar
    record = json.loads((newest_set(held.parent) / "state.json").read_text(encoding="utf-8"))
    assert [settings["held_out"] for settings in record["identity"]["data"]["settings"]] == [asked["hold_out"]]

    assert_all_bitwise(load_file(train("held", place, from_step=2, validation=asked, **blocks)), lora)
    assert RunFolder(held.parent).validation == found
    with pytest.raises(ResumeError, match="held_out"):
        train("held", place, **noisy, train={**average, "steps": 4}, validation={"hold_out": ["2.png"]})

    raw_run = train("raw", place, train={"steps": 1, "lr": 0.1}, validation=asked, **noisy).parent
    raw = RunFolder(raw_run).validation
    assert raw[0] == found[0]
    assert 0 < abs(found[1][1] - raw[0][1]) < abs(raw[1][1] - raw[0][1]) / 2  # the raw weights would be 1


def test_nan_stops_the_run_and_nothing_is_saved(place, monkeypatch, capsys):
    settings = {"steps": 1, "lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": 10}}
    with pytest.raises(DeadRunError, match="every lora_B is still zero"):
        train("dead", place, train=settings, network=FEW_LINEARS)
    set_limits(monkeypatch, nonfinite_steps=2)
    original = Objective.__call__
    monkeypatch.setattr(Objective, "__call__", lambda self, batch, draw: original(self, batch, draw) * float("nan"))
    job = engine_job("nan", **place, train={"steps": 9}, coat={"memory": {"log_every": 2}}, network=FEW_LINEARS)
    job["config"]["process"][0]["logging"] = {"verbose": True}
    with pytest.raises(DeadRunError, match=r"step 2: loss=nan.*nothing was trained yet"):
        COATTrainer(job).train()
    assert "[before_forward] Step 2: Allocated: " in capsys.readouterr().out  # details, too
    assert not list((place["out"] / "nan").glob("*.safetensors"))


def test_streamed_weights_change_no_bit_of_a_run_that_is_killed_and_resumed(place, monkeypatch):
    blocks: dict[str, Any] = {"train": {"steps": 2, "disable_sampling": False, "skip_first_sample": True}}
    blocks |= {"save": {"save_every": 1, "dtype": "fp32"}, "network": FEW_LINEARS}
    resident = train("resident", place, coat={}, **blocks)
    blocks["coat"] = {"memory": {"stream_blocks": "all"}}
    announced: list[int] = []

    def killed(self: StreamedWeights, block: Any, outputs: Any) -> None:
        announced.append(1)
        if len(announced) == len(self.bytes) + 2:  # in the second step
            os.kill(os.getpid(), signal.SIGKILL)
        announce(self, block, outputs)

    announce = StreamedWeights.announce
    with monkeypatch.context() as patch:
        patch.setattr(StreamedWeights, "announce", killed)
        assert wait(fork(lambda: train("streamed", place, **blocks))) == -signal.SIGKILL
    streamed = place["out"] / "streamed" / "streamed.safetensors"
    assert not streamed.exists()
    assert train("streamed", place, **blocks) == streamed
    assert_all_bitwise(load_file(resident), load_file(streamed))
    assert losses(resident.parent) == losses(streamed.parent)
    pictures = [sorted((path.parent / "samples").iterdir()) for path in (resident, streamed)]
    assert [path.read_bytes() for path in pictures[0]] == [path.read_bytes() for path in pictures[1]]


# -- Weights & Biases: offline for real, missing, and broken --------------------------------------------------------
@pytest.fixture
def logged(place: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    train = {"steps": 1, "disable_sampling": False}
    job = engine_job("run", **{**place, "out": tmp_path}, train=train, network=FEW_LINEARS)
    logging = {"use_wandb": True, "project_name": "clothes", "run_name": "first", "log_every": 1}
    job["config"]["process"][0]["logging"] = logging
    return job


def test_an_offline_run_of_wandb_and_its_resume(logged, tmp_path, capsys):
    COATTrainer(logged).train()
    known = json.loads((tmp_path / "run" / "coat" / "wandb.json").read_text(encoding="utf-8"))["id"]
    [written] = (tmp_path / "run" / "coat" / "wandb").glob(f"offline-run-*/run-{known}.wandb")
    until = time.monotonic() + 20  # its own process writes
    while b"sample_0" not in (content := written.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)
    for text in (b"loss/loss", b"learning_rate", b"validation_loss", b"clothes", b"first"):
        assert text in content
    assert "W&B: " in capsys.readouterr().out
    assert not (tmp_path / "wandb").exists()
    logged["config"]["process"][0]["train"] |= {"steps": 2, "disable_sampling": True}
    COATTrainer(logged).train()
    assert json.loads((tmp_path / "run" / "coat" / "wandb.json").read_text(encoding="utf-8"))["id"] == known


def test_a_failure_of_wandb_ends_no_run_and_a_missing_one_is_told_before_the_model(logged, monkeypatch, capsys):
    logged["config"]["process"][0]["logging"]["project_name"] = "a/b"  # which W&B refuses
    assert COATTrainer(logged).train().is_file()
    assert capsys.readouterr().out.count("; the run goes on without it") == 1
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with pytest.raises(ConfigError, match="pip install wandb"):
        COATTrainer(logged).train()


def test_fp32_takes_the_same_course_and_coat_off_leaves_no_part_of_it(place, four, monkeypatch):
    for part in ("apply_coat", "attach_lora"):
        monkeypatch.setattr(session, part, lambda *_, **__: pytest.fail("COAT is off"))
    single = train("single", place, train={"steps": 2, "lr_scheduler": "cosine", "dtype": "fp32"})
    for bf16, fp32 in zip(losses(four.parent), losses(single.parent), strict=False):
        assert float(bf16) == pytest.approx(float(fp32), rel=tolerances.BF16_LOSS_RTOL)


# -- LoKr -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("width", "factor", "expected"),
    [(3072, 8, (8, 384)), (3072, -1, (48, 64)), (127, 8, (1, 127)), (360, 16, (15, 24)), (64, 16, (16, 4))],
)
def test_widths_are_split_as_in_ai_toolkit(width, factor, expected):
    assert split_width(width, factor) == expected


@pytest.mark.parametrize("rank", [None, 2])
def test_the_module_multiplies_by_the_kronecker_matrix(rank):
    base = torch.nn.Linear(24, 36)
    lokr = LokrLinear(base, 4, rank, torch.device("cpu"), torch.Generator().manual_seed(0))
    x = torch.randn(3, 5, 24)
    assert torch.equal(lokr(x), base(x))  # W2 begins with zero
    for parameter in lokr.parameters():
        torch.nn.init.normal_(parameter)
    torch.testing.assert_close(lokr(x), base(x) + x @ torch.kron(*lokr.adapter.matrices(torch.float32)).t())


@pytest.mark.parametrize(("full_rank", "coat"), [(True, {"memory": {"checkpointing": "none"}}), (False, None)])
def test_a_run_and_its_resume_end_with_the_same_file(full_rank, coat, place):
    network = {**FEW_LINEARS, "type": "lokr", "linear": 2, "lokr_factor": 8, "lokr_full_rank": full_rank}
    job = engine_job(f"lokr_{full_rank}", **place, coat=coat, train={"steps": 4}, network=network)
    job["config"]["process"][0]["save"]["save_every"] = 2
    seen: list[Any] = []
    final = COATTrainer(job, observer=seen.append).train()
    expected = load_file(final)
    assert_all_bitwise(load_file(COATTrainer(job).train(from_step=2)), expected)
    facts, session = JobFacts(seen[-1].job), seen[-1]
    assert facts.adapter_sizes == [parameter.numel() for parameter in session.lora.values()]
    assert optimizer_bytes(facts) == state_bytes(session.optimizer)
    assert ("fused flow, attention" in (final.parent / "coat" / "log.txt").read_text(encoding="utf-8")) == bool(coat)
    linears = {name.rpartition(".")[0] for name in expected}
    for name in linears:
        linear = session.transformer.get_submodule(name.removeprefix("transformer."))
        shapes = lokr_shapes(linear.out_features, linear.in_features, 8, None if full_rank else 2)
        assert {key: tuple(expected[f"{name}.{key}"].shape) for key in shapes} == shapes
        assert expected[f"{name}.alpha"] == 2
    assert sum(name.rpartition(".")[0] in linears for name in expected) == len(expected)
    last = "lokr_w2" if full_rank else "lokr_w2_b"
    assert any(expected[f"{name}.{last}"].any() for name in linears)
