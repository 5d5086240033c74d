"""`coat-flux check`: the whole YAML, model and photos, in seconds; `data`, `mask`, `caption`: a folder of photos."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.ai_toolkit_keys import CLASSES_FILE, Toolkit, find_toolkit
from ..config.check import TRAINERS, check_job_dict
from ..config.coat import AUTO
from ..config.findings import ConfigError, Finding
from ..config.job import JobConfig, coat_of_entry
from ..config.job_file import load_job_yaml
from ..config.job_sections import PROCESS_TYPES
from ..config.rules import AI_TOOLKIT, STANDALONE
from .common import EXIT_REFUSED, UsageError, add_command, number, print_findings, show_warnings

if TYPE_CHECKING:
    from ..data.preflight import DataReport

SMALLEST, LARGEST = 32, 8192


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    parser = add_command(commands, "check", check, "check YAML, model and photos before a run", of_config=True)
    parser.add_argument(
        "--host",
        choices=TRAINERS,
        help="who will run it (default: ai-toolkit with --ai-toolkit or in its folder; else the stand-alone trainer, "
        "or ai-toolkit if only that can, and it is here, or with --elsewhere)",
    )
    parser.add_argument(
        "--ai-toolkit",
        metavar="DIR",
        help="ai-toolkit's folder, whose own keys count (default: AI_TOOLKIT_ROOT, else the working directory if it is "
        "one, else a list that comes with coat-flux)",
    )
    parser.add_argument("--no-data", action="store_true", help="skip photos and captions")
    parser.add_argument(
        "--elsewhere", action="store_true", help="it will run on another machine: do not check for GPU and model here"
    )
    parser = add_command(commands, "data", data, "check photos and captions, draw a contact sheet")
    parser.add_argument("data", type=Path, metavar="DIR", help="folder of photos, or a YAML with datasets")
    pixels = number(SMALLEST, LARGEST)
    parser.add_argument("--resolution", nargs="+", type=pixels, metavar="PX", help="default: 512 768 1024")
    parser.add_argument("--caption-ext", metavar="EXT", help="default: txt")
    parser.add_argument("--trigger", metavar="WORD", help="trigger_word")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="default: output/data/<name>.png")
    masks = add_command(commands, "mask", mask, "draw a mask of the garment in each photo")
    captions = add_command(commands, "caption", caption, "draft a caption for each photo")
    models = "mattmdjaga/segformer_b2_clothes", "Salesforce/blip-image-captioning-large"
    for parser, model in zip((masks, captions), models, strict=True):
        parser.add_argument("dir", type=Path, metavar="FOLDER", help="of photos")
        parser.add_argument("--model", metavar="NAME", default=model, help="Hub name or folder (default: %(default)s)")
        parser.add_argument("--device", choices=("cpu", "cuda"), help="of the model (default: the GPU if there is one)")
    masks.add_argument("--labels", metavar="A,B", help="of the model (default: all that are a garment's)")
    masks.add_argument("--out", type=Path, metavar="DIR", help="default: FOLDER_masks, beside the photos")
    masks.add_argument("--sheet", type=Path, metavar="FILE", help="default: output/data/<name>.png")
    captions.add_argument("--about", metavar="A,B", help="of models that can be asked (default: background,pose,light)")
    captions.add_argument("--ext", default="txt", help="the data set's caption_ext (default: txt)")


def check(args: argparse.Namespace) -> int:
    """Check every key and value of a YAML, the model, and the photos and captions, without loading a model.

    One line for each finding. Errors stop a run, and end this command with exit code 2; warnings do not. A last line
    says whether the other of the two trainers, stand-alone and ai-toolkit, would run it as well. Where neither is asked
    for, it is enough that one of those that are here would.
    """
    root = find_toolkit(args.ai_toolkit)
    raw = load_job_yaml(args.config, name=args.name)
    from ..blocks.models.check import check_models  # with torch, which a mistake in the command does not need
    from ..blocks.models.checkpoint import describe_file

    file = os.fspath(args.config)
    findings = {host: check_job_dict(raw, file=file, trainer=host, toolkit_root=root) for host in TRAINERS}
    sound = [host for host in TRAINERS if not _errors(findings[host])]
    for host in sound:
        findings[host] += check_models(raw, file=file, trainer=host, toolkit_root=root, elsewhere=args.elsewhere)
    here = TRAINERS if root is not None or args.elsewhere else (STANDALONE,)
    able = [host for host in here if not _errors(findings[host])]
    host = args.host
    if host is None and (args.ai_toolkit or Path(CLASSES_FILE).is_file()):
        host = AI_TOOLKIT
    elif host is None:
        host = able[0] if able else STANDALONE
    errors = _errors(findings[host])
    warnings = [item for item in findings[host] if item.severity != "error"]
    failed = print_findings([item.line() for item in errors], [item.line() for item in warnings])
    if host in sound and not args.no_data:
        from ..data.preflight import check_data

        failed = print_findings(*check_data(raw)) or failed
    if not failed and not args.elsewhere:
        failed = check_outputs(raw, file)
    names = {STANDALONE: "the stand-alone trainer", AI_TOOLKIT: f"{AI_TOOLKIT} {Toolkit(root).version}"}
    if args.host != AI_TOOLKIT:
        other = STANDALONE if host == AI_TOOLKIT else AI_TOOLKIT
        _print_other_host(names[other], errors, _errors(findings[other]))
    if failed:
        return EXIT_REFUSED
    process, text = raw["config"]["process"][0], f"{file}: no error found for {names[host]}"
    if process.get("type") in PROCESS_TYPES:
        folder = _run_folder(raw, process)
        steps = (process.get("train") or {}).get("steps", 1000)
        text += f"; '{folder.name}' would train {steps} steps into {folder}"
        if not args.elsewhere:
            print_weights(process, file)
            if host == STANDALONE and (line := describe_file(JobConfig.from_dict(raw, file=file))):
                print(line)
        if (process.get("validation") or {}).get("fidelity"):
            print(f"coat-flux data {file} says how near the VAE alone comes to the photos held out")
    print(text)
    return 0


def print_weights(process: Mapping[str, Any], file: str) -> None:
    """Print what `weight.format: auto` is on the job's device, timed now if no run has."""
    import torch

    from ..blocks.formats import config_for, linear_sizes

    coat = coat_of_entry(process, file)
    if coat.weight.format == AUTO:
        picked = config_for(torch.device(process.get("device") or "cuda"), coat, linear_sizes(process)).chosen
        if picked is not None:  # None without COAT, or without products in 8 bits
            print(picked.describe(f"coat.weight.format: auto is {picked.name}", digits=2))


def check_outputs(raw: dict[str, Any], file: str) -> bool:
    """Print problems of the job's output folder and free space; returns whether they stop the run."""
    from ..plan.job import check_trained, job_space
    from ..saves.commit import check_output
    from ..saves.errors import ResumeError
    from ..saves.state import require_readable

    ours = [process for process in raw["config"]["process"] if process.get("type") in PROCESS_TYPES]
    job, findings = JobConfig.examine(raw, file=file) if ours else (None, None)
    failed, space = False, None  # unknown model sizes, or a LoRA that is not ours
    if job is not None and not findings.errors:
        try:
            check_trained(job)
        except ConfigError as error:
            failed = print_findings([f"{file}: config.process[0].{error}"], [])
        with suppress(ConfigError):
            space = job_space(job)
    for process in ours:
        folder = _run_folder(raw, process)
        errors, warnings = check_output(folder, space)
        try:
            train = process.get("train") or {}
            require_readable(folder, train.get("optimizer") or "adamw")
        except ResumeError as error:
            errors.append(str(error))
        failed = print_findings(errors, warnings) or failed
    return failed


def _run_folder(raw: dict[str, Any], process: dict[str, Any]) -> Path:
    return Path(process["training_folder"]) / (process.get("name") or raw["config"]["name"])


def _errors(findings: Sequence[Finding]) -> list[Finding]:
    return [item for item in findings if item.severity == "error"]


def _print_other_host(name: str, shown: Sequence[Finding], errors: Sequence[Finding]) -> None:
    known = {(item.key, item.text) for item in shown}
    own = [item.line() for item in errors if (item.key, item.text) not in known]
    if own:
        print("\n  ".join([f"{name}: would not run it:", *own]))
    elif errors:
        print(f"{name}: would not run it either, for the same reasons")
    else:
        print(f"{name}: would run it" + ("" if shown else " too"))


def data(args: argparse.Namespace) -> int:
    """Read every photo and caption as training would, and list what is wrong, cropped or corrected.

    Nothing in the folder is changed. The contact sheet shows the photos as they are read, with the frames of their
    crops. Exit code 2 where training would be refused.
    """
    from ..data.captions import SET_TRIGGER
    from ..data.preflight import inspect_process

    if args.data.is_file():
        for flag in ("resolution", "caption_ext", "trigger"):
            if getattr(args, flag) is not None:
                text = f"is what {args.data} says; leave the option out, or name a folder"
                raise UsageError(f"--{flag.replace('_', '-')}: {text}")
        job = load_job_yaml(args.data)
        found = [check_job_dict(job, file=str(args.data), trainer=host) for host in TRAINERS]
        if all(map(_errors, found)):  # refused by both trainers: the stand-alone one's findings
            raise ConfigError(_errors(found[0]))
        on_model = [item.line() for item in found[0] if "name_or_path" in item.key]
        print_findings((), on_model)
        process = job["config"]["process"][0]
        name = process["name"] = process.get("name") or job["config"]["name"]
        report = inspect_process(process)
    else:
        name = args.data.resolve().name
        resolution = args.resolution or [512, 768, 1024]
        entry = {"folder_path": str(args.data), "caption_ext": args.caption_ext, "resolution": resolution}
        model = {"is_flux": True}
        report = inspect_process({"datasets": [entry], "trigger_word": args.trigger, "model": model})
        if args.trigger is None:  # a YAML may have one
            report.warnings = [line for line in report.warnings if not line.endswith(SET_TRIGGER)]
    for table in report.tables:
        print(table)
    print_findings((), report.warnings)
    save_sheet(report, args.sheet, name)
    if print_findings(report.errors, ()):
        return EXIT_REFUSED
    if args.data.is_file() and (process.get("validation") or {}).get("fidelity"):
        print_vae_alone(process, report)
    return 0


def print_vae_alone(process: Mapping[str, Any], report: DataReport) -> None:
    """Print how near the VAE alone comes to held-out photos: no training comes nearer. Nothing is downloaded."""
    from diffusers import AutoModel

    from ..data.cache import decode_latents, encode_latents
    from ..data.fidelity import compare, evenly, show, to_picture
    from ..data.hold_out import choose_hold_out
    from ..data.images import to_tensor
    from ..data.loader import picture_of
    from ..data.preflight import datasets_of

    folders = [entry.folder_path for entry in datasets_of(process, regularization=False)]
    chosen = choose_hold_out(folders, process["validation"]["hold_out"], process.get("training_seed"))
    held_out = {path for paths in chosen for path in paths}
    samples = {sample.image_path: sample for sample in report.samples if sample.image_path in held_out}
    model = process["model"]["name_or_path"]
    try:
        vae = AutoModel.from_pretrained(model, subfolder="vae", local_files_only=True)
    except OSError:
        print(f"{model}: its VAE is not here; the run says at its start how near it comes to held-out photos")
        return
    print("The VAE alone, which no training can pass:")
    for sample in evenly(list(samples.values())):
        picture, mask = picture_of(sample, report.options.background)
        drawn = to_picture(decode_latents(vae, encode_latents(vae, to_tensor(picture)[None])))
        print(f"  {sample.image_path.name}: {show(compare(picture, drawn, mask))}")


def save_sheet(report: DataReport, sheet: Path | None, name: str) -> None:
    """Draw the contact sheet of a report into `sheet` (default: output/data/<name>.png), if there are photos."""
    from ..data.sheet import MOST_PHOTOS, contact_sheet

    count = len(report.photos) + len(report.unreadable)
    if not count:
        return
    sheet = sheet or Path("output") / "data" / f"{name}.png"
    try:
        sheet.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(report).save(sheet)
    except (OSError, ValueError) as error:
        text = f"--sheet {sheet}: cannot be written ({error}); name another file ending in .png"
        raise UsageError(text) from error
    print(f"contact sheet: {sheet}" + (f" (the first {MOST_PHOTOS} of {count})" if count > MOST_PHOTOS else ""))


def mask(args: argparse.Namespace) -> int:
    """Write a mask for each photo, white where the garment is: `mask_path` of a data set, for either trainer.

    It is the photo's own transparency where it has some; else a segmentation model of transformers draws it, which is
    downloaded at its first use. No mask is ever written over: remove one to have it made again, or paint it yourself.
    The contact sheet tints what is not trained. Exit code 2 where a photo got none because of an error.
    """
    photos, device = _find_photos(args)
    folder = args.dir.resolve()
    out = args.out or folder.with_name(f"{folder.name}_masks")
    if out.resolve().is_relative_to(folder):
        raise UsageError(
            f"--out {out}: is inside {args.dir}, where masks would train as photos; name a folder beside it"
        )
    from ..data.drafts import BY_MODEL, FAILED, FROM_ALPHA, KEPT, NOTHING, Parser, draw_masks
    from ..data.preflight import inspect_process

    done = draw_masks(photos, out, lambda: Parser(args.model, _names(args.labels), device))
    drawn, kept = len(done[FROM_ALPHA]) + len(done[BY_MODEL]), len(done[KEPT])
    print(f"{out}: {len(done[FROM_ALPHA])} masks from transparency, {len(done[BY_MODEL])} by {args.model}, {kept} kept")
    remedy = "paint one, or try other --labels"
    print_findings((), [f"{name}: no garment was found, it has no mask; {remedy}" for name in done[NOTHING]])
    if drawn + kept:
        entry = {"folder_path": str(args.dir), "mask_path": str(out), "resolution": [1024]}
        save_sheet(inspect_process({"datasets": [entry], "model": {"is_flux": True}}), args.sheet, out.name)
        print(f"look at them, then write into the data set of your YAML: mask_path: {out}")
    return EXIT_REFUSED if print_findings(done[FAILED], ()) else 0


def caption(args: argparse.Namespace) -> int:
    """Write a draft of a caption beside each photo that has none: `[trigger]`, then a sentence by a model.

    The model is one of transformers that describes images, such as BLIP, Florence-2 or Qwen-VL, downloaded at its
    first use. One with a chat template is asked for what is not the garment. No caption is ever written over: read
    them all, and correct them. Exit code 2 where a photo got none.
    """
    from ..data.captions import TEXT_EXTENSIONS
    from ..data.drafts import FAILED, KEPT, WRITTEN, Captioner, draft_captions

    extension = f".{args.ext.lstrip('.')}"
    if extension not in TEXT_EXTENSIONS:
        raise UsageError(f"--ext {args.ext}: is none of a caption; write one of {', '.join(TEXT_EXTENSIONS)}")
    photos, device = _find_photos(args)
    done = draft_captions(photos, extension, lambda: Captioner(args.model, _names(args.about), device))
    for line in [*done[WRITTEN], *(f"{name}: has a caption, which is kept" for name in done[KEPT])]:
        print(line)
    written, kept, failed = (len(done[each]) for each in (WRITTEN, KEPT, FAILED))
    print(f"{args.dir}: {written} captions by {args.model}, {kept} kept, {failed} failed")
    if written:
        print("they are drafts: delete the garment's name, color and cut, for which [trigger] stands")
    return EXIT_REFUSED if print_findings(done[FAILED], ()) else 0


def _find_photos(args: argparse.Namespace) -> tuple[list[Path], str]:
    """The photos of FOLDER, with warnings of what cannot be read there, and the device; raises UsageError."""
    if not args.dir.is_dir():
        raise UsageError(f"{args.dir}: is not a folder; name the one with the photos")
    import torch

    from ..data.files import Listing

    show_warnings()
    listing = Listing(args.dir)
    print_findings((), listing.errors + listing.warnings)
    if not listing.images:
        raise UsageError(f"{args.dir}: has no photos; name the folder with them")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and best == "cpu":
        raise UsageError("--device cuda: torch finds no CUDA GPU here; leave --device out")
    return listing.images, args.device or best


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
