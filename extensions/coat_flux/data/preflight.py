"""The check of the data before a model is loaded, for `check`, `data` and both trainers."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import ImageStat

from ..config.coat import COATConfig, DataOptions
from ..config.findings import Findings
from ..config.job_sections import PROCESS_TYPES, DatasetSection, ValidationSection
from ..config.options import build, config_fields
from ..config.rules import arch_of
from .buckets import STEP, Bucket, Sample, cropped_share, fit_to_bucket, training_size
from .captions import inject_trigger, lint_captions, lint_files, read_caption
from .files import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, DatasetError, Listing, counted, media_read, printable
from .hold_out import choose_hold_out
from .images import DEFAULTS, TRAITS, TRANSPARENT, PhotoFacts, near_duplicates, read_photo, survey
from .masks import find_mask, lint_masks

logger = logging.getLogger(__name__)

SMALL_SHARE = 0.75  # of the pixels a resolution asks for
CROPPED_SHARE = 0.27  # 3:4 in a square loses 0.25, and 0.26 at 64 px
FEWEST_PHOTOS = 10
INVISIBLE = 0.002  # mean alpha
LEAST_VISIBLE = 0.01  # mean alpha in the crop, if alpha is the loss mask
T5_ARCHS = ("flux", "flux_kontext", "chroma", "chroma_radiance")
_LISTED = 5


class DataReport:
    """Findings on every image, read in full, and caption, tables of buckets and corrections, the trainable samples.

    `dataset_configs` are blocks of `datasets`; `reads_t5` as in `lint_captions`.
    """

    def __init__(
        self,
        dataset_configs: Sequence[Any],
        trigger_word: str | None = None,
        options: DataOptions = DEFAULTS,
        *,
        reads_t5: bool = True,
    ):
        self.options = options
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.tables: list[str] = []
        self.samples: list[Sample] = []
        self.photos: dict[Path, PhotoFacts] = {}
        self.unreadable: list[Path] = []
        for index, config in enumerate(dataset_configs):
            self._inspect(index, config, trigger_word, reads_t5)
        if options.transparency == "mask" and self.photos:
            self._check_masks()
        self.errors = list(dict.fromkeys(self.errors))  # several entries may share a folder
        self.warnings = list(dict.fromkeys(self.warnings))

    def usable(self, warn: Callable[[str], None] = logger.warning) -> list[Sample]:
        """The samples, after all warnings; raises DatasetError with the first errors."""
        if self.errors:
            lines = self.errors[:_LISTED]
            if len(self.errors) > _LISTED:
                lines.append(f"... and {len(self.errors) - _LISTED} more; `coat-flux data` lists them all")
            raise DatasetError("\n".join(lines))
        for line in self.warnings:
            warn(line)
        return self.samples

    def _check_masks(self) -> None:
        """Report photos whose crop is transparent all over: their loss would have no pixels."""
        transparent = {path for path, facts in self.photos.items() if TRANSPARENT in facts.traits}
        if not transparent:
            self.warnings.append("coat.data.transparency=mask: no photo has transparent parts; it has no effect")
        crops = {(sample.image_path, sample.bucket) for sample in self.samples if sample.image_path in transparent}
        for path, bucket in sorted(crops, key=str):
            _, alpha = read_photo(path)
            if ImageStat.Stat(fit_to_bucket(alpha, bucket)).mean[0] / 255 < LEAST_VISIBLE:
                text = f"nothing visible is left in its crop to {bucket.width}x{bucket.height}"
                self.errors.append(f"{printable(path)}: {text}; move the product to the middle, or remove it")

    def _inspect(self, index: int, config: Any, trigger_word: str | None, reads_t5: bool) -> None:
        folder = Path(config.folder_path)
        where = f"datasets[{index}].folder_path={printable(folder)}"
        ext = config.caption_ext.lstrip(".")
        wanted = f"put images there (photo{', photo'.join(IMAGE_EXTENSIONS)}), each with its caption (photo.{ext})"
        if not folder.is_dir():
            kind = "this is a file, not a folder" if folder.exists() else "folder not found"
            self.errors.append(f"{where}: {kind}; make it and {wanted}, or correct the path")
            return
        listing = Listing(folder)
        self.errors += listing.errors
        self.warnings += listing.warnings
        media, unread = listing.media, []
        listing.media = []
        for path in media:
            read = path.name.lower().endswith(config.media)
            (listing.media if read else unread).append(path)
        text = "videos or sounds are not read (first: {first}); videos need num_frames above 1"
        self.warnings += counted(folder, unread, text)
        if not listing.images and not listing.media:
            if not listing.errors:
                self.errors.append(f"{where}: the folder has no images; {wanted}")
            return
        photos = {}
        for path, facts in survey(listing.images).items():
            name = printable(path)
            if isinstance(facts, DatasetError):
                self.errors.append(str(facts))
            elif min(facts.size) < STEP:
                size = f"{facts.size[0]}x{facts.size[1]}"
                self.errors.append(f"{name}: is {size} pixels, each side must have at least {STEP}; remove it")
            elif facts.opacity < INVISIBLE:
                self.errors.append(f"{name}: is transparent all over; export it again, or remove it")
            else:
                photos[path] = facts
                self.warnings += [f"{name}: {note}" for note in facts.notes]
        self.photos |= photos
        self.unreadable += [path for path in listing.images if path not in photos]
        errors, warnings = lint_files(folder, listing, ext, config.default_caption)
        self.errors += errors
        self.warnings += warnings
        raw = {}  # without images whose caption is missing or unreadable
        for path in (*listing.images, *listing.media):
            try:
                caption = read_caption(path, config.caption_ext)
            except DatasetError as error:
                self.errors.append(str(error))
            else:
                if caption is not None:
                    raw[path] = caption
        if not config.is_reg:  # whose captions name their subject
            self.warnings += lint_captions(folder, raw, trigger_word, config.default_caption, reads_t5)
        self.warnings += _about_photos(folder, photos, config)
        default = (config.default_caption or "").strip()
        adds_trigger = not config.is_reg
        dropped = inject_trigger("", trigger_word, adds_trigger)
        masks = {}
        for path, facts in photos.items():
            try:
                masks[path] = find_mask(path, facts.size, config)
            except DatasetError as error:
                self.errors.append(str(error))
        samples = []
        for resolution in config.resolution:
            for path in list(photos) * config.num_repeats:
                caption = inject_trigger(raw.get(path) or default, trigger_word, adds_trigger)
                bucket = training_size(photos[path].size, resolution, config)
                samples.append(Sample(path, caption, bucket, index, False, dropped, masks.get(path)))
        self.samples += samples
        if config.flip_x:
            self.samples += [replace(sample, flip=True) for sample in samples]
        if photos and (config.alpha_mask or config.mask_path):
            errors, warnings = lint_masks(folder, samples, config)
            self.errors += errors
            self.warnings += warnings
        where += f": {len(photos)} images"
        if listing.media:
            kind = "sounds" if config.media == AUDIO_EXTENSIONS else "videos"
            where += f", {len(listing.media)} {kind}"
        self.tables.append(_table(where, photos, raw, config))


def _about_photos(folder: Path, photos: dict[Path, PhotoFacts], config: Any) -> list[str]:
    """Warnings about small, cropped and repeated photos."""
    resolution = max(config.resolution)
    buckets = {path: training_size(facts.size, resolution, config) for path, facts in photos.items()}
    pixels = {path: facts.size[0] * facts.size[1] for path, facts in photos.items()}
    small = sorted((path for path in photos if pixels[path] < SMALL_SHARE * resolution**2), key=pixels.__getitem__)
    lines = []
    if small:
        width, height = photos[small[0]].size
        bucket = buckets[small[0]]
        text = (
            f"images are small for resolution {resolution}: the smallest, {{first}} of {width}x{height}, trains at "
            f"{bucket.width}x{bucket.height}; take larger photos, or a lower resolution"
        )
        lines += counted(folder, small, text)
    cut = [path for path, bucket in buckets.items() if cropped_share(photos[path].size, bucket) > CROPPED_SHARE]
    text = f"images lose more than {CROPPED_SHARE:.0%} of their area to the crop (first: {{first}}); crop or pad them"
    lines += counted(folder, cut, text)
    pairs = near_duplicates(photos)
    if pairs:
        alike = printable(pairs[0][0].name)
        text = f"images show nearly the same as another (first: {{first}}, like {alike}); remove them"
        lines += counted(folder, [second for _, second in pairs], text)
    return lines


def _table(where: str, photos: dict[Path, PhotoFacts], raw: Mapping[Path, str], config: Any) -> str:
    captions = sum(bool(caption) for caption in raw.values())
    lines = [
        f"{where}, {captions} captions",
        "  resolution      bucket  images  cropped  at most",
    ]
    for resolution in config.resolution:
        members: defaultdict[Bucket, list[float]] = defaultdict(list)
        for facts in photos.values():
            bucket = training_size(facts.size, resolution, config)
            members[bucket].append(cropped_share(facts.size, bucket))
        for bucket, shares in sorted(members.items()):
            size = f"{bucket.width}x{bucket.height}"
            mean = sum(shares) / len(shares)
            lines.append(f"  {resolution:>10}  {size:>10}  {len(shares):>6}  {mean:>6.1%}  {max(shares):>7.1%}")
    counts = Counter(trait for facts in photos.values() for trait in facts.traits)
    corrections = [f"{counts[trait]} {trait}" for trait in TRAITS if counts[trait]]
    lines.append(f"  corrected while reading: {', '.join(corrections) or 'nothing'}")
    return "\n".join(lines)


def check_data(job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Errors and warnings about photos and captions of a job (from `load_job_yaml`) without config errors."""
    errors: list[str] = []
    warnings: list[str] = []
    for process in job["config"]["process"]:
        if process.get("type") not in PROCESS_TYPES or not process.get("datasets"):
            continue
        report = inspect_process(process)
        errors += report.errors
        warnings += report.warnings
        validation = build(ValidationSection, process.get("validation"), "validation", Findings(""))
        trained = [data.folder_path for data in datasets_of(process, regularization=False)]
        try:
            choose_hold_out(trained, validation.hold_out, process.get("training_seed"))
        except DatasetError as error:
            errors.append(str(error))
    return errors, warnings


def datasets_of(process: Mapping[str, Any], *, regularization: bool = True) -> Iterator[DatasetSection]:
    """A process entry's datasets, without the JSON lists that only ai-toolkit reads."""
    known = config_fields(DatasetSection)
    arch = arch_of(process.get("model") or {})
    for entry in process.get("datasets") or []:
        place = entry.get("dataset_path") or entry.get("folder_path")
        wanted = regularization or not entry.get("is_reg")
        if wanted and isinstance(place, str) and os.path.splitext(place)[1].lower() != ".json":
            keys = {key: value for key, value in entry.items() if key in known and value is not None}
            if entry.get("caption_type"):  # ai-toolkit's older name
                keys["caption_ext"] = entry["caption_type"]
            values = {**keys, "folder_path": place}
            yield build(DatasetSection, values, "datasets", Findings(""), media=media_read(entry, arch))


def inspect_process(process: Mapping[str, Any]) -> DataReport:
    """The report on the data of a process entry."""
    arch = arch_of(process.get("model") or {})
    options = build(COATConfig, process.get("coat"), "coat", Findings("")).data
    datasets = list(datasets_of(process))
    report = DataReport(datasets, process.get("trigger_word"), options, reads_t5=arch in T5_ARCHS)
    for entry in process.get("datasets") or []:
        place = str(entry.get("dataset_path") or entry.get("folder_path"))
        if place.lower().endswith(".json"):
            report.warnings.append(f"{printable(place)}: is a list; its photos are not checked")
    count = len(report.photos)
    if 0 < count < FEWEST_PHOTOS and not any(config.media for config in datasets):
        text = f"{count} photos: 10 to 40 teach a product; take more"
        report.warnings.append(f"datasets: {text}")
    return report
