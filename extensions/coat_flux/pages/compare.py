"""`coat-flux compare`: saves of a run × prompts × strengths, drawn with the same noise, as one grid.

    <out>/cells/<LoRA>_<strength>_<prompt>_<digest>.png   a picture; the digest is of all that it depends on
    <out>/compare.json                                    what is compared, from the start on
    <out>/grid.png, compare.html                          once all is drawn

A cell that is there is not drawn again, so an interrupted comparison continues, and a changed LoRA has other cells.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .. import __version__
from ..base.errors import UserError
from ..base.files import TEMP_PREFIX, discard, file_sha256, replacing, write_file
from ..base.names import COAT_TYPE
from ..blocks.models.check import require_here
from ..config.job import JobConfig
from ..config.job_file import load_job_yaml
from ..config.rules import is_full
from ..data.captions import inject_trigger
from ..data.files import printable
from ..mini_flux import provide_embedded
from ..saves.errors import save_errors
from ..saves.state import model_identity
from .html import Page
from .run import RunFolder, Saved

COMPARE = Path("coat") / "compare"
INDEX_FILE, GRID_FILE, PAGE_FILE = "compare.json", "grid.png", "compare.html"
MADE_BY = "coat-flux compare"
MOST_SAVES, MOST_PROMPTS = 6, 4
USED = ("dtype", "gradient_checkpointing", "name_or_path", "extras_name_or_path", "is_flux", "arch")  # of two blocks
SIDE, MARGIN, LINE = 384, 12, 28  # of the grid, in pixels; the first is the width of its pictures
PAPER, INK, BEST = "#f4f4f4", "#202020", "#1a7f37"


def choose_columns(run: RunFolder, loras: Sequence[Path], steps: Sequence[float]) -> tuple[list[Any], list[str]]:
    """No LoRA, then files, or saves by their `steps`, or up to `MOST_SAVES`; and lines for the user."""
    columns: list[dict[str, Any]] = [{"label": "without LoRA", "best": False, "file": None}]
    for path in loras:
        problem = Saved(path, [path]).problem
        if problem or steps:
            raise UserError(f"{path}: {problem or 'is a file, and --saves are of the run; give one of them'}")
        columns.append({"label": path.stem, "best": False, "file": str(path)})
    if loras:
        return columns, []
    named = re.compile(rf"{re.escape(run.name)}(_\d+)?")  # not what `coat-flux export` wrote
    saves = {save.step: save for save in run.saves if named.fullmatch(save.name) and not save.problem}
    known = sorted(step for step in saves if step is not None)
    odd = [f"{step:g}" for step in steps if step not in known]
    if odd or not known:
        asked = f"--saves {odd[0]}: names a step that was not saved" if odd else f"RUN_DIR={run.path}: has no LoRA yet"
        raise UserError(f"{asked}; saves there: {', '.join(map(str, known)) or 'none'}")
    try:
        measures = [("ΔE", run.fidelity.get("colour", []))]
        measures += [("loss", run.validation)] if run.block("validation") else []
    except ValueError as error:
        raise UserError(f"RUN_DIR={run.path}: {error}; correct or remove that file") from error
    best, values, lines = None, {}, ["No save is marked as the best: fidelity and held-out loss were measured at none"]
    for unit, curve in measures:
        values = {int(step): value for step, value in curve if step in known and math.isfinite(value)}
        if values:
            best = min(values, key=lambda step: values[step])
            lines = [
                f"Best on held-out photos by {unit}: step {best}; what is near it may be as good (see the run's log)"
            ]
            break
    count, chosen = len(known), [step for step in known if step in steps] or known
    if not steps and count > MOST_SAVES:
        places = [(i + 1) * count // MOST_SAVES - 1 for i in range(MOST_SAVES)]  # evenly spaced, with the last
        marked = places[-1] if best is None else known.index(best)
        if marked not in places:
            places[min(range(MOST_SAVES - 1), key=lambda i: abs(places[i] - marked))] = marked
        chosen = [known[place] for place in places]
        lines.append(f"{MOST_SAVES} of {count} saves, of steps {', '.join(map(str, chosen))}; others by --saves")
    for step in chosen:
        label = f"step {step}, {unit} {values[step]:.4g}" if step in values else f"step {step}"
        label += ", best" if step == best else ""
        columns.append({"label": label, "best": step == best, "file": str(saves[step].path)})
    return columns, lines


def job_of(run: RunFolder, prompts: Sequence[str], changes: Mapping[str, int]) -> JobConfig:
    """The job that draws, of either trainer's run: model, LoRA, `coat:` block, `sample` block with `changes`."""
    path = run.path / "config.yaml"
    process = load_job_yaml(path)["config"]["process"][0]
    if is_full(process):
        raise UserError(f"RUN_DIR={run.path}: trained the whole model; LoRAs are compared")
    own = {key: process[key] for key in ("device", "trigger_word", "network", "sample") if key in process}
    for block in ("train", "model"):
        own[block] = {key: value for key, value in process[block].items() if key in USED}
    if prompts:
        own["sample"] = {**(own.get("sample") or {}), "prompts": list(prompts), "samples": []}
    quantized = process["type"] == COAT_TYPE or bool(process["model"].get("quantize"))
    coat = process.get("coat") or {"enabled": quantized}
    own["coat"] = {key: value for key, value in coat.items() if key != "optimizer"}
    own |= {"type": COAT_TYPE, "training_folder": str(run.path.parent), "datasets": [{"folder_path": "not read"}]}
    job = JobConfig.from_dict({"job": "extension", "config": {"name": run.name, "process": [own]}}, file=str(path))
    items = job.sample.items()[: len(prompts) or MOST_PROMPTS]
    if not items:
        raise UserError(f"{path}: sample has no prompts; give some with --prompts")
    require_here(job)
    provide_embedded(job.model.name_or_path)
    items = tuple(replace(item, **changes) for item in items)
    return replace(job, sample=replace(job.sample, prompts=(), samples=items))


def make_index(job: JobConfig, columns: Sequence[Any], strengths: Sequence[float], lines: Sequence[str]) -> Any:
    """The content of compare.json: the columns, and a row of cells for each prompt and strength."""
    setting = [model_identity(job.model.name_or_path), job.coat.to_dict(), job.train.dtype]
    files = [column["file"] and file_sha256(Path(column["file"])) for column in columns]
    rows = []
    for (number, item), strength in itertools.product(enumerate(job.sample.items()), strengths):
        prompt = inject_trigger(item.prompt, job.trigger_word, add_if_missing=False)
        cells = []
        for column, digest in zip(columns, files, strict=True):
            own = strength if column["file"] else 0.0
            whole = json.dumps([setting, digest, own, prompt, asdict(item)], default=list)
            name = Path(column["file"] or "base").stem[-60:]
            code = hashlib.sha256(whole.encode()).hexdigest()[:16]
            cells.append(f"cells/{name}_{own:g}_{number}_{code}.png")
        title = f"{prompt} (seed {item.seed}, strength {strength:g})"
        rows.append({"title": title, "strength": strength, "number": number, "cells": cells})
    return {"made by": MADE_BY, "name": job.name, "lines": list(lines), "columns": list(columns), "rows": rows}


def read_index(folder: Path) -> Any:
    """The content of a folder's compare.json; None if it has none of ours."""
    try:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        return index if index["made by"] == MADE_BY else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def draw_comparison(job: JobConfig, index: Any, out: Path, log: Callable[[str], None]) -> Path:
    """Draw the cells that are not in `out` yet, the grid and the page, which is returned; UserError, SaveError."""
    if out.exists() and any(out.iterdir()) and read_index(out) is None:
        raise UserError(f"--out {out}: holds other files; name a new folder")
    with save_errors(out, "the comparison cannot be written", "pictures that are drawn stay"):
        write_file(out / INDEX_FILE, json.dumps(index, indent=1))
        for leftover in out.glob(f"cells/{TEMP_PREFIX}*"):
            discard(leftover)
        _draw_cells(job, index, out, log)
        with replacing(out / GRID_FILE) as temp:
            draw_grid(index, out).save(temp, format="PNG")
        page = Page(f"{index['name']}: saves compared", f"By coat-flux {__version__}: {out.resolve()}")
        show_comparison(page, index, out)
        return page.write(out / PAGE_FILE)


def _draw_cells(job: JobConfig, index: Any, out: Path, log: Callable[[str], None]) -> None:
    columns, rows = index["columns"], index["rows"]
    every = {cell for row in rows for cell in row["cells"]}
    done = sum((out / cell).exists() for cell in every)
    log(f"{len(every)} pictures, {done} of them drawn before")
    if done == len(every):
        return
    from ..trainers.standalone.session import LoraDrawer

    drawer = LoraDrawer(job)
    for column in columns:
        drawer.read(column["file"])  # a wrong file is refused before anything is drawn
    strengths = dict.fromkeys(row["strength"] for row in rows)
    for (place, column), strength in itertools.product(enumerate(columns), strengths):
        missing = [row for row in rows if row["strength"] == strength and not (out / row["cells"][place]).exists()]
        if missing:
            drawer.load(drawer.read(column["file"]), strength)
        for row in missing:
            began = time.monotonic()
            with replacing(out / row["cells"][place]) as temp:
                drawer.draw(row["number"]).save(temp, format="PNG")
            done += 1
            what = f"{column['label']}, strength {strength:g}, prompt {row['number'] + 1}"
            log(f"{done} of {len(every)}: {what} ({time.monotonic() - began:.1f} s)")


def draw_grid(index: Any, folder: Path) -> Image.Image:
    """All cells in one picture, those of the best save framed."""
    columns, strips = index["columns"], []
    font, width = ImageFont.load_default(20), MARGIN + len(index["columns"]) * (SIDE + MARGIN)
    for row in index["rows"]:
        pictures = [Image.open(folder / cell).convert("RGB") for cell in row["cells"]]
        height = round(SIDE * pictures[0].height / pictures[0].width)
        texts = textwrap.wrap(printable(row["title"]), width // 11)
        top = MARGIN + LINE * len(texts)
        strip = Image.new("RGB", (width, top + height + LINE + MARGIN), PAPER)
        draw = ImageDraw.Draw(strip)
        draw.multiline_text((MARGIN, MARGIN), "\n".join(texts), fill=INK, font=font)
        for number, (column, picture) in enumerate(zip(columns, pictures, strict=True)):
            left = MARGIN + number * (SIDE + MARGIN)
            strip.paste(picture.resize((SIDE, height), Image.Resampling.LANCZOS), (left, top))
            label = printable(column["label"])[: SIDE // 11].replace("ΔE", "dE")  # the font has no Δ
            draw.text((left, top + height + 2), label, fill=BEST if column["best"] else INK, font=font)
            if column["best"]:
                draw.rectangle((left, top, left + SIDE - 1, top + height - 1), outline=BEST, width=5)
        strips.append(np.asarray(strip))
    return Image.fromarray(np.concatenate(strips))


def show_comparison(page: Page, index: Any, folder: Path) -> None:
    """Add the pictures that are drawn, a row for each prompt and strength, those of the best save marked."""
    columns, missing = index["columns"], set()
    page.paragraph("\n".join(index["lines"]))
    for row in index["rows"]:
        drawn = [pair for pair in zip(columns, row["cells"], strict=True) if (folder / pair[1]).exists()]
        missing.update(cell for cell in row["cells"] if not (folder / cell).exists())
        items = [(column["label"], folder / cell) for column, cell in drawn]
        marked = [place for place, (column, _) in enumerate(drawn) if column["best"]]
        width = max(200, min(280, 1088 // len(columns)))  # on a telephone at least half of it
        page.images(row["title"], items, columns=len(columns), width=width, marked=marked)
    if missing:
        page.missing(f"{len(missing)} pictures are still to be drawn: start coat-flux compare again.")
    page.missing(f"A row is drawn from the same noise. Pictures in full size: {folder.resolve() / 'cells'}")
