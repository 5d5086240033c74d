"""One self-contained HTML file: text is escaped, and a policy keeps browsers from fetching anything."""

from __future__ import annotations

import base64
import io
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from PIL import Image, ImageOps

from ..base.files import write_file
from ..blocks.models import FLUX, FLUX2
from .charts import Points, line_chart

__all__ = ["Page", "Tone"]

Tone: TypeAlias = Literal["good", "bad", "open", "plain"]

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NUMBER = re.compile(r"–|[-+±~<]?(>=)?[\d.,]+(e-?\d+)?( ?(%|dB|GB|MB|s))?")
SHORT = 12  # characters of a cell, or of a word in a column's name, that are never broken
STACKED_COLUMNS = 4  # columns from which rows become blocks on a narrow screen
SMALL_BYTES = 192 * 1024  # of a picture embedded unchanged
LONGEST_SIDE = 448  # of a picture, in pixels
QUALITY = 82
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


class Page:
    """A page built from top to bottom; pictures are at `samples_at`, or embedded."""

    def __init__(self, title: str, subtitle: str = "", samples_at: str | None = None):
        self.title, self._samples_at = title, samples_at
        self.parts = [f"<h1>{escape(title)}</h1>"]
        if subtitle:
            self.parts.append(f'<p class="subtitle">{escape(subtitle)}</p>')

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2) or a subsection (3 to 6)."""
        self.parts.append(f"<h{level}>{escape(text)}</h{level}>")

    def paragraph(self, text: str) -> None:
        """Add a paragraph; line breaks are kept."""
        self.parts.append(f"<p>{escape(text).replace(chr(10), '<br>')}</p>")

    def verdict(self, text: str, tone: Tone) -> None:
        """Add the result in one sentence, on green (good), red (bad), yellow (open) or blue (plain)."""
        self.parts.append(f'<p class="verdict {tone}" role="status">{escape(text)}</p>')

    @contextmanager
    def details(self, title: str, *, is_open: bool = False) -> Iterator[None]:
        """Collapse what is added inside the `with` block."""
        before, self.parts = self.parts, []
        try:
            yield
        finally:
            inside = "\n".join(self.parts)
            opened = " open" if is_open else ""
            folded = f"<details{opened}><summary>{escape(title)}</summary>\n{inside}\n</details>"
            self.parts = [*before, folded]

    def missing(self, text: str) -> None:
        """Say what could not be shown, and why."""
        self.parts.append(f'<p class="missing">{escape(text)}</p>')

    def code(self, text: str) -> None:
        """Add text to be copied verbatim."""
        self.parts.append(f"<pre>{escape(text)}</pre>")

    def result(self, path: Path, model: str, trigger: str | None, arch: str | None = None) -> None:
        """Name a LoRA's file, or a whole model's folder, and how to load it."""
        path = path.resolve()
        self.code(str(path))
        family = FLUX2 if any(arch in archs for archs in FLUX2.pipelines.values()) else FLUX
        pipeline = next((name for name, archs in family.pipelines.items() if arch in archs), "FluxPipeline")
        if path.is_dir():
            self.paragraph("diffusers:")
            self.code(
                f"own = {family.transformer}.from_pretrained("
                f"{str(path)!r}, subfolder='transformer', dtype=torch.bfloat16)\n"
                f"pipe = {pipeline}.from_pretrained({model!r}, transformer=own, torch_dtype=torch.bfloat16)"
            )
            return
        if family is FLUX2:
            self.paragraph("ComfyUI needs a file that the stand-alone trainer saved of FLUX.2 in another layout:")
            self.code(f"coat-flux export {shlex.quote(str(path))} --to comfyui")
        word = f" Put the trigger word in your prompts: {trigger}." if trigger else ""
        self.paragraph(f"ComfyUI: copy the file to ComfyUI/models/loras and load it with a Load LoRA node.{word}")
        self.paragraph("diffusers:")
        self.code(
            f"pipe = {pipeline}.from_pretrained({model!r}, torch_dtype=torch.bfloat16)\n"
            f"pipe.load_lora_weights({str(path.parent)!r}, weight_name={path.name!r})"
        )

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[object]], shades: tuple[float, float] | None = None
    ) -> None:
        """Add a table of `str` values, None as a dash. A header of empty names is left out.

        With `shades`, numbers of type float are shaded from red at the first to green at the second.
        """
        heads = []
        for name in header:
            whole = ' class="short"' if max(map(len, name.split()), default=0) <= SHORT else ""
            heads.append(f"<th{whole}>{escape(name)}</th>")
        head, kind = f"<thead><tr>{''.join(heads)}</tr></thead>", ""
        if not any(header):
            head, kind = "", ' class="facts"'
        elif len(header) >= STACKED_COLUMNS:
            kind = ' class="stacking"'
        lines = []
        for row in rows:
            cells = ""
            for value, column in zip(row, header, strict=True):
                text, style = "–" if value is None else str(value), ""
                if shades is not None and isinstance(value, float):
                    text = f"{value:.1f}"
                    place = min(max((value - shades[0]) / (shades[1] - shades[0]), 0.0), 1.0)
                    paper = f"var(--{'bad' if place < 0.5 else 'good'}-paper) {abs(200 * place - 100):.0f}%"
                    style = f' style="background: color-mix(in srgb, {paper}, var(--paper))"'
                kinds = ["short"] if len(text) <= SHORT else []
                kinds += ["number"] if NUMBER.fullmatch(text) else []
                label = f' data-label="{escape(column)}"' if column else ""
                cells += f'<td class="{" ".join(kinds)}"{label}{style}>{escape(text)}</td>'
            lines.append(f"<tr>{cells}</tr>")
        body = "".join(lines)
        self.parts.append(f'<div class="wide"><table{kind}>{head}<tbody>{body}</tbody></table></div>')

    def curves(self, title: str, series: Mapping[str, Points], **options: Any) -> None:
        """Add a `charts.line_chart`."""
        if any(math.isfinite(value) for points in series.values() for _, value in points):
            self.parts.append(line_chart(title, series, **options))
        else:
            self.missing(f"{title}: there is nothing to show")

    def images(
        self,
        title: str,
        items: Sequence[tuple[str, Path]],
        *,
        columns: int = 4,
        header: Sequence[str] = (),
        width: int = 160,
    ) -> None:
        """Add a grid of reduced pictures (caption, file), row by row; unreadable ones are named.

        Columns are `width` pixels wide. On a narrow screen rows wrap, unless there is a header or a single column.
        """
        cells = "".join(f'<div class="head">{escape(name)}</div>' for name in header)
        for text, path in items:
            below = f"<figcaption>{escape(text)}</figcaption>" if text else ""
            source = f"{self._samples_at}/{quote(path.name)}"
            try:
                if self._samples_at is None:
                    source = _data_uri(path)
                picture = f'<img alt="{escape(text)}" src="{source}">{below}'
            except (OSError, ValueError) as error:
                problem = escape(f"{text}: cannot be read ({error})")
                picture = f'<figcaption class="missing">{problem}</figcaption>'
            cells += f"<figure>{picture}</figure>"
        caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
        wrapping = " wrapping" if columns > 1 and not header else ""
        grid = f'<div class="grid{wrapping}" style="--columns: {columns:d}">{cells}</div>'
        self.parts.append(
            f'<figure class="gallery" style="width: min(100%, {columns * width:d}px)">{caption}{grid}</figure>'
        )

    def html(self, head: str = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">') -> str:
        """Return the page so far; `head` goes into its head."""
        body = "\n".join(self.parts)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>{head}</head><body>\n{body}\n</body></html>\n"
        )

    def write(self, path: Path) -> Path:
        """Write the page atomically; returns `path`."""
        write_file(path, self.html().encode(errors="replace"))
        return path


def _data_uri(path: Path) -> str:
    with Image.open(path) as image:
        small = max(image.size) <= LONGEST_SIDE and path.stat().st_size <= SMALL_BYTES
        if small and image.format in MEDIA_TYPES:
            image.load()  # fails on a truncated file
            return f"data:{MEDIA_TYPES[image.format]};base64,{base64.b64encode(path.read_bytes()).decode()}"
        upright = ImageOps.exif_transpose(image)
    upright.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    colours, jpeg = upright.convert("RGBA"), io.BytesIO()
    paper = Image.new("RGBA", colours.size, "white")
    Image.alpha_composite(paper, colours).convert("RGB").save(jpeg, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}"
