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
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from mini_flux.experiment import TRAIN_PHOTOS, TRIGGER, VALIDATION_PHOTOS, make_job, prompt_items, write_photos
from mini_flux.samples import draw_prompts, load_pipeline, prompts_of, sheet
from mini_flux.scorer import accuracies, judge, load_scorer, right

from coat_flux.base.files import replacing
from coat_flux.config.coat import WEIGHT_FORMATS
from coat_flux.pages.charts import Band, Points
from coat_flux.pages.html import Page
from coat_flux.study import Judgement, Settings, Study, Verdict, open_study, verify
from coat_flux.study import judge as judge_gap
from coat_flux.study.report import TONES
from coat_flux.study.runs import bf16_arm, run_name
from coat_flux.trainers.standalone.loading import load_transformer

ROOT = Path(__file__).resolve().parents[1]
COAT: dict[str, Any] = {"memory": {"checkpointing": "none"}}  # all else are the defaults: all is on
ARMS = ("bf16", "coat")
WORDS = {"bf16": "bf16", "coat": "COAT"}
FIRST_SEED = 1  # as in `make_job`
CURVE_POINTS = 20
SHOWN, SHOWN_COLUMNS = 6, 3  # pictures of each run on the page
BASE = "no LoRA"


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
    return parser.parse_args()


def job_of(options: argparse.Namespace) -> dict[str, Any]:
    """The config of all runs; draws the photos."""
    photos, _ = write_photos(options.out / "photos")
    coat = {**COAT, "weight": {"format": options.weight}}
    if options.weight == "int8":  # on both sides of a product
        coat["activation"] = {"format": "int8"}
    job = make_job(
        options.model, photos, options.out, steps=options.steps, coat=coat, lr=options.lr, batch=options.batch
    )
    if options.full:
        process = job["config"]["process"][0]
        del process["network"], process["save"]["dtype"], process["model"]["quantize"], process["model"]["qtype"]
    return job


def settings_of(options: argparse.Namespace) -> Settings:
    """How they are compared."""
    every = max(1, options.steps // CURVE_POINTS)
    return Settings(validation=options.out / "photos" / "validation", every=every, curve_sigmas=1, final_sigmas=8)


def study_of(options: argparse.Namespace) -> Study:
    """The comparison, open."""
    return open_study(job_of(options), settings_of(options), folder=options.out / "runs")


def train(options: argparse.Namespace, arm: str, seed: int) -> str:
    """Trains one run, or goes on with it, or finds it done; a line to say."""
    torch.set_num_threads(1)
    study = study_of(options)
    run = study.train_arm(arm, bf16_arm(study.job) if arm == "bf16" else {}, seed)
    return f"{run.name}: loss {run.final_own:.6f}, {run.seconds:.0f} s"


def train_all(options: argparse.Namespace) -> None:
    """Trains every run, seed by seed."""
    study_of(options)  # written before processes read it
    tasks = [(arm, seed) for seed in range(FIRST_SEED, FIRST_SEED + options.seeds) for arm in ARMS]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for line in pool.map(train, [options] * len(tasks), *zip(*tasks, strict=True)):
            print(line, flush=True)


def score(options: argparse.Namespace, loras: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Prompt accuracy without a LoRA and with each; pictures go to `<out>/pictures`."""
    path, folder = options.out / "accuracy.json", options.out / "pictures"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {name: shares for name, shares in known.items() if shares.get("prompts") == options.prompts}
    folder.mkdir(parents=True, exist_ok=True)
    items, scorer, pipeline = prompt_items(options.prompts), load_scorer(), load_pipeline(options.model)
    prompts = prompts_of(items, trigger=TRIGGER)
    for name, lora in {BASE: None, **loras}.items():
        if name in found:
            continue
        if options.full:
            pipeline.transformer = load_transformer(str(lora or options.model), pipeline.dtype)
        elif lora is not None:
            pipeline.load_lora_weights(lora.parent, weight_name=lora.name)
        pixels = draw_prompts(pipeline, prompts)
        if lora is not None and not options.full:
            pipeline.unload_lora_weights()
        sheet(pixels[:SHOWN], [], SHOWN_COLUMNS, enlarged=1).save(folder / f"{name}.png", optimize=True)
        found[name] = accuracies(right(judge(scorer, pixels), items)) | {"prompts": options.prompts}
        with replacing(path) as temp:
            temp.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: " + ", ".join(f"{key} {share:.1%}" for key, share in found[name].items() if key != "prompts"))
    return found


def measures_of(verdict: Verdict, shares: Mapping[str, Mapping[str, float]]) -> list[Measure]:
    """All numbers that are compared."""

    def by_arm(of: Any) -> dict[str, list[float]]:
        return {arm: [of(run) for run in verdict.arm(arm)] for arm in ARMS}

    scores = verdict.scores
    if scores is None:
        raise SystemExit(verdict.sentence)
    return [
        Measure("loss in the bf16 model", by_arm(lambda run: scores.losses[run.name]), ".6f"),
        Measure("loss in its own precision", by_arm(lambda run: run.final_own), ".6f"),
        Measure("prompts drawn right", by_arm(lambda run: shares[run.name]["all four"]), ".1%"),
    ]


def seed_rows(measures: Sequence[Measure], seeds: Sequence[int]) -> list[list[str]]:
    """Per seed the pairs of every measure, then means and standard deviations."""
    rows = [
        [str(seed), *(format(m.values[arm][i], m.form) for m in measures for arm in ARMS)]
        for i, seed in enumerate(seeds)
    ]
    for name, of in (("mean", fmean), ("standard deviation", stdev)):
        rows.append([name, *(format(of(m.values[arm]), m.form) for m in measures for arm in ARMS)])
    return rows


def gap_rows(measures: Sequence[Measure]) -> list[list[str]]:
    """Per measure: mean gap, its interval, bf16's spread, and whether the one is inside the other."""
    rows = []
    for measure in measures:
        found = judge_gap(measure.values["bf16"], measure.values["coat"])
        form = "+" + measure.form
        interval = f"{found.low:{form}} to {found.high:{form}}"
        inside = "yes" if abs(found.gap) <= found.spread else "no"
        spread = f"{found.spread:{measure.form}}"
        rows.append([measure.name, f"{found.gap:{form}}", interval, spread, inside, found.outcome])
    return rows


def seed_header(measures: Sequence[Measure]) -> list[str]:
    """Of `seed_rows`."""
    return ["seed", *(f"{measure.name}: {arm}" for measure in measures for arm in ("bf16", "COAT"))]


GAP_HEADER = [
    "COAT minus bf16, same seed",
    "mean gap",
    "95% interval",
    "bf16's sd over seeds",
    "mean gap within",
    "verdict",
]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
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
        f"{VALIDATION_PHOTOS} photos of other combinations at 8 noise levels each, the same noise for all. Accuracy: "
        f"{options.prompts} prompts of combinations that are in neither, 20 steps. A run's seed decides LoRA start, "
        f"order, noise, timesteps and dropped captions. torch {torch.__version__}, {platform.machine()} CPU."
    )


def mean_curves(verdict: Verdict) -> tuple[dict[str, Points], dict[str, Band]]:
    """Mean validation loss over the run by arm, and its band of one standard deviation over seeds."""
    means, bands = {}, {}
    for arm, name in WORDS.items():
        points = list(zip(*(run.curve for run in verdict.arm(arm)), strict=True))
        means[name] = [(one[0][0], fmean(loss for _, loss in one)) for one in points]
        spreads = [stdev(loss for _, loss in one) for one in points]
        bands[name] = [(step, mean - s, mean + s) for (step, mean), s in zip(means[name], spreads, strict=True)]
    return means, bands


def write_page(
    path: Path,
    judgement: Judgement,
    measures: Sequence[Measure],
    seeds: Sequence[int],
    curves: tuple[Mapping[str, Points], Mapping[str, Band]],
    pictures: Path,
    texts: tuple[str, str],
) -> None:
    """One self-contained HTML page of it all.

    Args:
        path: of the page.
        judgement: the verdict.
        measures: all that is compared.
        seeds: of the pairs.
        curves: from `mean_curves`.
        pictures: folder of `score`.
        texts: the setting, and what the model does without a LoRA.
    """
    setting, base = texts
    page = Page("Is COAT lossless?", f"scripts/prove_lossless.py: {len(seeds)} pairs of LoRAs of the mini-FLUX")
    page.verdict(f"{judgement.sentence[:1].upper()}{judgement.sentence[1:]}.", TONES[judgement.outcome])
    page.table(GAP_HEADER, gap_rows(measures))
    page.heading("The same prompts and noise, drawn with each LoRA")
    prompts = "; ".join(prompts_of(prompt_items(SHOWN), trigger=TRIGGER))
    page.paragraph(f"From left to right, top to bottom: {prompts}.")
    page.images("", [(BASE, pictures / f"{BASE}.png")], columns=1, width=420)
    pairs = [(f"seed {seed}", pictures / f"{run_name(arm, seed)}.png") for seed in seeds for arm in WORDS]
    page.images("", pairs, columns=2, header=list(WORDS.values()), width=420)
    page.heading("Validation loss over the run")
    title = "Each run in its own precision, mean over seeds; band: ± standard deviation"
    page.curves(title, curves[0], x="step", y="loss", band=curves[1])
    page.heading("Details")
    with page.details("What was run"):
        page.paragraph(setting)
        page.paragraph(base)
    with page.details("Every seed"):
        page.table(seed_header(measures), seed_rows(measures, seeds))
    page.write(path)


def write_results(options: argparse.Namespace, verdict: Verdict, shares: Mapping[str, Mapping[str, float]]) -> None:
    """All numbers as JSON, without a path of this machine."""
    runs = [
        {"arm": run.arm, "seed": run.seed, "curve": run.curve, "loss_own_precision": run.final_own}
        | {"loss_in_bf16_model": verdict.scores.losses[run.name], "accuracy": shares[run.name]}
        for run in verdict.runs
    ]
    base = {"loss": verdict.scores.base, "accuracy": shares[BASE]}
    results = {"setting": setting_of(options), "sentence": verdict.sentence, "without_lora": base, "runs": runs}
    results["cosines"] = verdict.as_json()["cosines"]
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Trains, measures, writes."""
    options = parse_arguments()
    options.model, options.out = options.model.resolve(), options.out.resolve()
    train_all(options)
    verdict = verify(
        job_of(options),
        seeds=options.seeds,
        settings=settings_of(options),
        folder=options.out / "runs",
    )
    shares = score(options, {run.name: run.lora for run in verdict.runs})
    measures = measures_of(verdict, shares)
    seeds = [run.seed for run in verdict.arm("bf16")]
    base = [
        f"Without a LoRA: loss {verdict.scores.base:.6f}, {shares[BASE]['all four']:.1%} of the prompts drawn right."
    ]
    garment = fmean(shares[run.name]["garment"] for run in verdict.runs)
    base.append(f"A prompt is drawn right if all four attributes are; the garment is in {garment:.1%} of all pictures.")
    tables = markdown(GAP_HEADER, gap_rows(measures)) + "\n"
    tables += markdown(seed_header(measures), seed_rows(measures, seeds))
    text = f"{setting_of(options)}\n\n{verdict.sentence}\n\n{' '.join(base)}\n\n{tables}"
    (options.out / "table.md").write_text(text, encoding="utf-8")
    write_results(options, verdict, shares)
    if options.page:
        curves, texts = mean_curves(verdict), (setting_of(options), " ".join(base))
        write_page(options.page, verdict.judgement, measures, seeds, curves, options.out / "pictures", texts)
    print(f"\n{text}")


if __name__ == "__main__":
    sys.exit(main())
