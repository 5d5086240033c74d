"""`coat-flux compare` on a tiny run: its own samples again, interrupted and continued, and what is refused."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from coat_flux.base.errors import UserError
from coat_flux.base.table import FIDELITY, FIDELITY_FILE
from coat_flux.cli.entry import main
from coat_flux.export.lora_files import convert_file
from coat_flux.pages.compare import choose_columns, job_of
from coat_flux.pages.report import write_report
from coat_flux.pages.run import RunFolder
from coat_flux.trainers.standalone.session import LoraDrawer
from tests.helpers.engine_job import FEW_LINEARS, TRIGGER, train
from tests.reliability.forks import KILLED, at_operation, fork, quick_forks, wait

PHOTOS, STEPS = 2, 3
OUT = Path("coat") / "compare"
COAT = {"memory": {"log_memory_stats": False}}


@pytest.fixture(scope="module")
def trained(place: dict[str, Path]) -> Path:
    """A run with a save and samples at each step, and figures of fidelity by which step 2 is best."""
    sample = {"prompts": ["[trigger] shirt", "a blue [trigger]"], "walk_seed": True, "sample_steps": 2}
    blocks = {"sample": sample | {"sample_every": 1, "format": "png"}}
    blocks |= {"save": {"save_every": 1, "dtype": "float32"}, "network": FEW_LINEARS}
    final = train("run", place, coat=COAT, train={"steps": STEPS, "lr": 0.05, "disable_sampling": False}, **blocks)
    rows = [f"{step},{colour},9,0.1,2,5,0.1" for step, colour in enumerate([9, 6, 4, 5])]
    (final.parent / FIDELITY_FILE).write_text("\n".join([",".join(FIDELITY), *rows]) + "\n")
    return final.parent


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def compare(run: Path, *argv: object, code: int = 0) -> dict[str, Any]:
    """Run the command; returns the index in its folder, if any."""
    assert main(["compare", *map(str, (run, *argv))]) == code
    out = Path(argv[argv.index("--out") + 1]) if "--out" in argv else run / OUT
    file = out / "compare.json"
    return json.loads(file.read_text()) if file.exists() else {}


def cells_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "cells").iterdir())}


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


def test_cells_are_the_runs_own_samples_and_the_best_is_marked(run, capsys):
    index = compare(run)
    samples = RunFolder(run).samples()
    assert len(samples) == (STEPS + 1) * 2
    for row in index["rows"]:
        assert TRIGGER in row["title"]
        drawn = [pixels(run / OUT / cell) for cell in row["cells"]]
        assert drawn == [pixels(samples[step, row["number"]]) for step in range(STEPS + 1)]
        assert len(set(drawn)) == STEPS + 1
    assert [column["best"] for column in index["columns"]] == [False, False, True, False]
    assert "by ΔE: step 2" in capsys.readouterr().out
    with Image.open(run / OUT / "grid.png") as grid:
        assert grid.width > 4 * 384
        assert grid.height > 2 * 384
    for page in (run / OUT / "compare.html", write_report(run)):
        text = page.read_text()
        assert text.count('<figure class="marked">') == 2
        assert "step 2, ΔE 4, best" in text
        assert not re.findall(r'(?:src|href)="(?!data:)', text)


def test_a_lokrs_cells_are_its_runs_samples_and_half_of_it_is_less(place):
    sample = {"prompts": ["[trigger] shirt"], "sample_steps": 1, "sample_every": 2, "format": "png"}
    blocks = {"network": FEW_LINEARS | {"type": "lokr", "lokr_factor": 4}, "save": {"dtype": "float32"}}
    blocks["train"] = {"steps": 2, "lr": 0.05, "disable_sampling": False}
    run = train("lokr", place, coat=COAT, sample=sample, **blocks).parent
    cells = compare(run, "--strengths", "0.5,1")["rows"]
    drawn = {pixels(run / OUT / cell) for row in cells for cell in row["cells"]}
    assert {pixels(path) for path in RunFolder(run).samples().values()} < drawn
    assert len(drawn) == 3


def test_only_what_changed_is_drawn_again(run, tmp_path, monkeypatch):
    small = ["--prompts", "a [trigger]", "--steps", 1, "--out", tmp_path / "out"]
    drawn: list[int] = []
    draw = LoraDrawer.draw
    monkeypatch.setattr(LoraDrawer, "draw", lambda self, number: drawn.append(number) or draw(self, number))
    index = compare(run, *small, "--strengths", "0.5,1")
    assert len(drawn) == 1 + 2 * STEPS
    assert len({pixels(tmp_path / "out" / cell) for row in index["rows"] for cell in row["cells"]}) == 1 + 2 * STEPS
    compare(run, *small, "--strengths", "1")
    assert len(drawn) == 1 + 2 * STEPS
    save = run / "run_000000001.safetensors"
    other = {name: value * 2 for name, value in load_file(save).items()}
    save_file(other, save, {"training_info": json.dumps({"step": 1, "epoch": 0})})
    compare(run, *small, "--strengths", "1")
    assert len(drawn) == 2 + 2 * STEPS
    compare(run, *small, "--seed", 5, "--saves", "3")
    assert len(drawn) == 4 + 2 * STEPS
    convert_file(save, tmp_path / "x.safetensors", "kohya")
    rows = compare(run, save, tmp_path / "x.safetensors", *small)["rows"]
    assert len({pixels(tmp_path / "out" / cell) for cell in rows[0]["cells"]}) == 2  # the same in both layouts


def test_killed_at_any_moment_and_continued(run, tmp_path):
    pytest.importorskip("resource", reason="needs a system with os.fork")
    small = [str(run), "--prompts", "a [trigger]", "--steps", "1", "--out"]
    assert main(["compare", *small, str(tmp_path / "whole")]) == 0
    whole, counts = cells_of(tmp_path / "whole"), []
    draw, end = LoraDrawer.draw, lambda *_: os._exit(KILLED)
    with quick_forks():
        for operation in (1, 12, 26, None):
            out = tmp_path / f"killed{operation}"

            def work(out: Path = out, operation: int | None = operation) -> None:
                if operation is None:  # while the third picture is drawn
                    draws = iter([draw, draw, end])
                    LoraDrawer.draw = lambda *args: next(draws)(*args)
                else:
                    at_operation(operation, out, end)
                main(["compare", *small, str(out)])

            assert wait(fork(work)) == KILLED
            before = {path: path.stat().st_mtime_ns for path in out.glob("cells/run*.png")}
            counts.append(len(before))
            assert main(["compare", *small, str(out)]) == 0
            assert cells_of(out) == whole
            assert before == {path: path.stat().st_mtime_ns for path in before}
    assert counts[:3] == sorted(counts[:3])
    assert counts[3] == 1  # beside the one without a LoRA


def test_interrupted_it_says_how_to_go_on(run, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LoraDrawer, "draw", interrupt)
        compare(run, "--steps", 1, code=130)
    assert f"To go on: coat-flux compare {run} --steps 1" in capsys.readouterr().out
    assert "8 pictures are still to be drawn" in write_report(run).read_text()
    compare(run, "--steps", 1)
    assert "still to be drawn" not in write_report(run).read_text()


def save_of(folder: Path, change: Any) -> Path:
    """A file of the run's last LoRA with changed tensors."""
    save_file(change(load_file(folder / "run.safetensors")), folder / "changed.safetensors")
    return folder / "changed.safetensors"


def no_saves(run: Path) -> list[Any]:
    for path in run.glob("*.safetensors"):
        path.rename(run / f"{path.stem}_comfyui.safetensors")  # as `export` names its files
    return []


def configured(run: Path, **blocks: Any) -> list[Any]:
    """Change blocks and values of the run's config."""
    job = yaml.safe_load((run / "config.yaml").read_text())
    process = job["config"]["process"][0]
    for name, block in blocks.items():
        process[name] = {**(process.get(name) or {}), **block} if isinstance(block, dict) else block
    (run / "config.yaml").write_text(yaml.safe_dump({**job, "config": {**job["config"], "process": [process]}}))
    return []


def foreign(run: Path) -> list[Any]:
    (run / OUT).mkdir()
    (run / OUT / "mine.txt").write_text("mine")
    return []


def _wider(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dims = {name: 0 if ".lora_A." in name else 1 for name in tensors}
    return {name: torch.cat([x, x.narrow(dims[name], 0, 1)], dims[name]) for name, x in tensors.items()}


def _more(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {name.replace("s.0.", "s.1."): x.clone() for name, x in tensors.items()}


REFUSED = {
    "no saves": (no_saves, "has no LoRA yet"),
    "unknown step": (lambda run: ["--saves", "7"], "--saves 7"),
    "a file and steps": (lambda run: [run / "run.safetensors", "--saves", "1"], "--saves"),
    "no LoRA": (lambda run: [run / "optimizer.pt"], "optimizer.pt"),
    "another rank": (lambda run: [save_of(run, _wider)], "(5, "),
    "more layers": (lambda run: [save_of(run, _more)], "has none"),
    "no prompts": (lambda run: configured(run, sample={"prompts": []}), "--prompts"),
    "a whole model": (lambda run: configured(run, network=None), "whole model"),
    "another model": (lambda run: configured(run, model={"arch": "qwen_image"}), "model.arch"),
    "no base": (lambda run: configured(run, model={"name_or_path": "no/such/model"}), "model.name_or_path"),
    "a user's folder": (foreign, "--out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused(case, run, capsys):
    spoil, message = REFUSED[case]
    compare(run, *spoil(run), code=2)
    error = capsys.readouterr().err
    assert "error: " in error
    assert message in error
    assert not list((run / OUT).glob("cells/*"))


def test_at_most_six_saves_with_the_last_and_the_best(run):
    for step in range(4, 21):
        save_file({"a": torch.zeros(1)}, run / f"run_{step:09d}.safetensors", {"training_info": f'{{"step": {step}}}'})
    with (run / FIDELITY_FILE).open("a") as table:
        table.write("5,1,9,0.1,2,5,0.1\n17,3,9,0.1,2,5,0.1\n")
    columns, lines = choose_columns(RunFolder(run), [], [])
    steps = [int(re.search(r"step (\d+)", column["label"])[1]) for column in columns[1:]]
    assert steps == [3, 5, 10, 13, 16, 20]
    assert [column["best"] for column in columns].index(True) == 2
    assert "6 of 20 saves, of steps 3, 5, 10, 13, 16, 20" in lines[-1]
    (run / FIDELITY_FILE).unlink()
    assert not any(column["best"] for column in choose_columns(RunFolder(run), [], [])[0])
    configured(run, validation={"hold_out": 1, "every": 1})
    (run / "coat" / "validation.csv").write_text("step,loss\n0,0.1\n1,0.3\n2,0.4\n3,nan\n")
    columns, lines = choose_columns(RunFolder(run), [], [1, 2])
    assert [column["label"] for column in columns] == ["without LoRA", "step 1, loss 0.3, best", "step 2, loss 0.4"]
    with pytest.raises(UserError, match="--saves 21"):
        choose_columns(RunFolder(run), [], [21])


def test_a_run_of_ai_toolkit_is_drawn_over_an_fp8_base(run):
    quantized = {"quantize": True, "qtype": "qfloat8", "quantize_te": True}
    own = {"type": "sd_trainer", "performance_log_every": 10, "coat": None}
    configured(run, model=quantized, train={"unload_text_encoder": True}, **own)
    drawn = job_of(RunFolder(run), [], {"seed": 3, "width": 32})
    assert drawn.coat.enabled
    assert drawn.coat.weight.use_fp8
    assert [(item.seed, item.width, item.height) for item in drawn.sample.items()] == [(3, 32, 64)] * 2
    labels = [column["label"] for column in compare(run, "--steps", 1)["columns"]]
    assert labels[1:] == ["step 1, ΔE 6", "step 2, ΔE 4, best", "step 3, ΔE 5"]


@pytest.mark.parametrize("argv", [["--strengths", "big"], ["--strengths", "nan"], ["--width", "100"], ["--saves", ""]])
def test_values_that_are_no_numbers(argv, run, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare(run, *argv)
    assert argv[0] in capsys.readouterr().err
