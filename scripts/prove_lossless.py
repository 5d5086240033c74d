"""Does COAT lose anything? The mini-FLUX learns a garment it has never seen, in bf16 and with COAT, seed by seed.

    python scripts/prove_lossless.py [--model MODEL] [--out FOLDER] [--jobs 2]

Draws photos of the held-out garment, trains a LoRA on them in pairs of runs (`coat_flux.study`: same LoRA start,
order, noise and timesteps; all of COAT is on), and measures each LoRA twice: its loss on other photos, with noise that
is the same for all, and how many pictures drawn from prompts with the trigger word show what was asked for, by the
classifier of `mini_flux/scorer.py`. Each measure's mean gap is held against bf16's own standard deviation over seeds.

Writes results.json, table.md and, with --page, one HTML page. Started again it goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from mini_flux.experiment import TRAIN_PHOTOS, TRIGGER, VALIDATION_PHOTOS, make_job, prompt_items, write_photos
from mini_flux.samples import draw_prompts, load_pipeline, prompts_of, sheet
from mini_flux.scorer import accuracies, judge, load_scorer, right

from coat_flux.base.files import write_file
from coat_flux.config.coat import WEIGHT_FORMATS
from coat_flux.pages.html import Page
from coat_flux.study import ArmResult, Study, Verdict, open_study, verify
from coat_flux.study import judge as judge_gap
from coat_flux.study.compare import TONES, WORDS, show_means
from coat_flux.study.study import bf16_arm
from coat_flux.trainers.standalone.loading import load_transformer

ROOT = Path(__file__).resolve().parents[1]
FIRST_SEED = 1  # as in `make_job`
SHOWN, SHOWN_COLUMNS = 6, 3  # pictures of each run on the page
BASE = "no LoRA"
GAPS = ["COAT minus bf16, same seed", "mean gap", "95% interval", "bf16's sd over seeds", "mean gap within", "verdict"]


class Measure(NamedTuple):
    """One number of each run, by arm and seed, and how it is written."""

    name: str
    values: Mapping[str, Sequence[float]]
    form: str


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "coat_mini_flux", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "lossless", metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="pairs of runs (default: 5)")
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--batch", type=int, default=4, metavar="N")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight", choices=WEIGHT_FORMATS, default="e4m3", help="how COAT stores frozen weights")
    parser.add_argument("--full", action="store_true", help="full fine-tuning in place of LoRAs; see --lr")
    parser.add_argument("--prompts", type=int, default=96, metavar="N", help="pictures drawn with each LoRA")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, one thread each")
    parser.add_argument("--page", type=Path, metavar="FILE", help="such as docs/lossless.html")
    options = parser.parse_args()
    options.model, options.out = options.model.resolve(), options.out.resolve()
    return options


def comparison(options: argparse.Namespace) -> Study:
    """All runs, on photos that are drawn here."""
    photos, validation = write_photos(options.out / "photos")
    coat: dict[str, Any] = {"memory": {"checkpointing": "none"}, "weight": {"format": options.weight}}
    if options.weight == "int8":  # on both sides of a product
        coat["activation"] = {"format": "int8"}
    job = make_job(
        options.model, photos, options.out, steps=options.steps, coat=coat, lr=options.lr, batch=options.batch
    )
    if options.full:
        process = job["config"]["process"][0]
        del process["network"], process["save"]["dtype"], process["model"]["quantize"], process["model"]["qtype"]
    return open_study(job, validation=validation, folder=options.out / "runs")


def train(options: argparse.Namespace, arm: str, seed: int) -> str:
    """Trains one run, or goes on with it, or finds it done; a line to say."""
    torch.set_num_threads(1)
    study = comparison(options)
    run = study.train_arm(arm, bf16_arm(study.job) if arm == "bf16" else {}, seed)
    return f"{run.name}: loss {run.final_own:.6f}, {run.seconds:.0f} s"


def score(options: argparse.Namespace, loras: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Prompt accuracy without a LoRA and with each; pictures go to `<out>/pictures`."""
    path, folder = options.out / "accuracy.json", options.out / "pictures"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    shares = {name: each for name, each in known.items() if each.get("prompts") == options.prompts}
    folder.mkdir(parents=True, exist_ok=True)
    items, scorer, pipeline = prompt_items(options.prompts), load_scorer(), load_pipeline(options.model)
    prompts = prompts_of(items, trigger=TRIGGER)
    for name, lora in {BASE: None, **loras}.items():
        if name in shares:
            continue
        if options.full:
            pipeline.transformer = load_transformer(str(lora or options.model), pipeline.dtype)
        elif lora is not None:
            pipeline.load_lora_weights(lora.parent, weight_name=lora.name)
        pixels = draw_prompts(pipeline, prompts)
        if lora is not None and not options.full:
            pipeline.unload_lora_weights()
        sheet(pixels[:SHOWN], SHOWN_COLUMNS).save(folder / f"{name}.png", optimize=True)
        shares[name] = accuracies(right(judge(scorer, pixels), items)) | {"prompts": options.prompts}
        write_file(path, json.dumps(shares, indent=1) + "\n")
        print(f"{name}: {shares[name]['all four']:.1%} of the prompts drawn right", flush=True)
    return shares


def measures_of(verdict: Verdict, shares: Mapping[str, Mapping[str, float]]) -> list[Measure]:
    """All numbers that are compared."""

    def by_arm(value: Callable[[ArmResult], float]) -> dict[str, list[float]]:
        return {arm: [value(run) for run in verdict.arm(arm)] for arm in WORDS}

    return [
        Measure("loss in the bf16 model", by_arm(lambda run: verdict.losses[run.name]), ".6f"),
        Measure("loss in its own precision", by_arm(lambda run: run.final_own), ".6f"),
        Measure("prompts drawn right", by_arm(lambda run: shares[run.name]["all four"]), ".1%"),
    ]


def seed_table(measures: Sequence[Measure], seeds: Sequence[int]) -> list[list[str]]:
    """A header, per seed the pairs of every measure, then means and standard deviations."""
    columns = [(measure, arm) for measure in measures for arm in WORDS]
    rows = [["seed", *(f"{measure.name}: {WORDS[arm]}" for measure, arm in columns)]]
    for i, seed in enumerate(seeds):
        rows.append([str(seed), *(format(measure.values[arm][i], measure.form) for measure, arm in columns)])
    for name, statistic in (("mean", fmean), ("standard deviation", stdev)):
        rows.append([name, *(format(statistic(measure.values[arm]), measure.form) for measure, arm in columns)])
    return rows


def gap_table(measures: Sequence[Measure]) -> list[list[str]]:
    """A header, then per measure: mean gap, its interval, bf16's spread, and whether the one is inside the other."""
    rows = [GAPS]
    for measure in measures:
        judgement = judge_gap(measure.values["bf16"], measure.values["coat"])
        form = "+" + measure.form
        interval = f"{judgement.low:{form}} to {judgement.high:{form}}"
        inside = "yes" if abs(judgement.gap) <= judgement.spread else "no"
        spread = f"{judgement.spread:{measure.form}}"
        rows.append([measure.name, f"{judgement.gap:{form}}", interval, spread, inside, judgement.outcome])
    return rows


def markdown(header: Sequence[str], *rows: Sequence[str]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def setting_of(options: argparse.Namespace) -> str:
    """What was run, in one paragraph."""
    what = "Full fine-tuning of" if options.full else "LoRA of rank 16 on"
    return (
        f"{what} the mini-FLUX for a garment it has never seen (trigger word {TRIGGER}): "
        f"{TRAIN_PHOTOS} drawn photos of 64 px, batch {options.batch}, {options.steps} steps, lr {options.lr:g}, "
        f"{options.seeds} seeds; COAT with every part on, nothing recomputed. Validation: "
        f"{VALIDATION_PHOTOS} photos of other combinations at 4 noise levels each, the same noise for all. Accuracy: "
        f"{options.prompts} prompts of combinations that are in neither, 20 steps. A run's seed decides LoRA start, "
        f"order, noise, timesteps and dropped captions. torch {torch.__version__}, {platform.machine()} CPU."
    )


def write_page(path: Path, verdict: Verdict, measures: Sequence[Measure], pictures: Path, texts: Sequence[str]) -> None:
    """One self-contained HTML page of it all; `texts` say what was run, `pictures` is the folder of `score`."""
    seeds = [run.seed for run in verdict.arm("bf16")]
    page = Page("Is COAT lossless?", f"scripts/prove_lossless.py: {len(seeds)} pairs of LoRAs of the mini-FLUX")
    sentence = verdict.judgement.sentence
    page.verdict(f"{sentence[:1].upper()}{sentence[1:]}.", TONES[verdict.judgement.outcome])
    header, *rows = gap_table(measures)
    page.table(header, rows)
    page.heading("The same prompts and noise, drawn with each LoRA")
    prompts = "; ".join(prompts_of(prompt_items(SHOWN), trigger=TRIGGER))
    page.paragraph(f"From left to right, top to bottom: {prompts}.")
    page.images("", [(BASE, pictures / f"{BASE}.png")], columns=1, width=420)
    pairs = [(f"seed {seed}", pictures / f"{arm}_seed{seed}.png") for seed in seeds for arm in WORDS]
    page.images("", pairs, columns=2, header=list(WORDS.values()), width=420)
    page.heading("Validation loss over the run")
    show_means(page, verdict)
    page.heading("Details")
    with page.details("What was run"):
        for text in texts:
            page.paragraph(text)
    with page.details("Every seed"):
        header, *rows = seed_table(measures, seeds)
        page.table(header, rows)
    page.write(path)


def write_results(path: Path, setting: str, verdict: Verdict, shares: Mapping[str, Mapping[str, float]]) -> None:
    """All numbers as JSON, without a path of this machine."""
    runs = [
        {"arm": run.arm, "seed": run.seed, "curve": run.curve, "loss_own_precision": run.final_own}
        | {"loss_in_bf16_model": verdict.losses[run.name], "accuracy": shares[run.name]}
        for run in verdict.runs
    ]
    base = {"loss": verdict.base, "accuracy": shares[BASE]}
    results = {"setting": setting, "sentence": verdict.judgement.sentence, "without_lora": base, "runs": runs}
    write_file(path, json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Trains, measures, writes."""
    options = parse_arguments()
    study = comparison(options)  # photos are drawn before processes read them
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    tasks = [(options, arm, seed) for seed in seeds for arm in WORDS]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for line in pool.map(train, *zip(*tasks, strict=True)):
            print(line, flush=True)
    verdict = verify(study, seeds=options.seeds)
    if verdict.base is None:
        raise SystemExit(verdict.judgement.sentence)
    shares = score(options, {run.name: run.lora for run in verdict.runs})
    measures = measures_of(verdict, shares)
    garment = fmean(shares[run.name]["garment"] for run in verdict.runs)
    base = (
        f"Without a LoRA: loss {verdict.base:.6f}, {shares[BASE]['all four']:.1%} of the prompts drawn right. "
        f"A prompt is drawn right if all four attributes are; the garment is in {garment:.1%} of all pictures."
    )
    setting = setting_of(options)
    tables = [markdown(*gap_table(measures)), markdown(*seed_table(measures, seeds))]
    text = "\n\n".join([setting, verdict.judgement.sentence, base, "\n".join(tables)])
    (options.out / "table.md").write_text(text, encoding="utf-8")
    write_results(options.out / "results.json", setting, verdict, shares)
    if options.page:
        write_page(options.page, verdict, measures, options.out / "pictures", [setting, base])
    print(f"\n{text}")


if __name__ == "__main__":
    sys.exit(main())
