"""One self-contained HTML file: text is escaped, a content security policy keeps browsers from fetching anything."""

from __future__ import annotations

import base64
import html
import io
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from PIL import Image, ImageOps

from ..base.files import write_file
from ..blocks.models import FLUX, FLUX2
from .charts import SHORT, Grid, Points, bar_chart, column_name, heat_map, line_chart
from .style import STYLE

__all__ = ["Page", "Tone"]

Tone: TypeAlias = Literal["good", "bad", "open", "plain"]

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NUMBER = re.compile(r"–|[-+±~<]?(>=)?[\d.,]+(e-?\d+)?( ?(%|dB|GB|MB|s))?")
STACKED_COLUMNS = 4  # columns from which rows become blocks on a narrow screen
SMALL_BYTES = 192 * 1024  # of a picture embedded unchanged
LONGEST_SIDE = 448  # of a picture, in pixels
QUALITY = 82
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


class Page:
    """A page built from top to bottom; without a title, parts of one. Pictures are at `samples_at`, or embedded."""

    def __init__(self, title: str, subtitle: str = "", samples_at: str | None = None):
        self._title, self._samples_at = title, samples_at
        self.parts: list[str] = []
        if title:
            self.parts.append(f"<h1>{_text(title)}</h1>")
        if subtitle:
            self.parts.append(f'<p class="subtitle">{_text(subtitle)}</p>')

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2) or a subsection (3 to 6)."""
        self.parts.append(f"<h{level}>{_text(text)}</h{level}>")

    def paragraph(self, text: str) -> None:
        """Add a paragraph; line breaks are kept."""
        self.parts.append(f"<p>{_text(text).replace(chr(10), '<br>')}</p>")

    def verdict(self, text: str, tone: Tone) -> None:
        """Add the result in one sentence, on green (good), red (bad), yellow (open) or blue (plain)."""
        self.parts.append(f'<p class="verdict {tone}" role="status">{_text(text)}</p>')

    def progress(self, done: int, steps: int) -> None:
        """Add a bar of the steps done."""
        self.parts.append(f'<progress max="{max(steps, 1)}" value="{done}" aria-label="steps done"></progress>')

    @contextmanager
    def details(self, title: str, *, is_open: bool = False) -> Iterator[None]:
        """Collapse what is added inside the `with` block."""
        before, self.parts = self.parts, []
        try:
            yield
        finally:
            inside = "\n".join(self.parts)
            opened = " open" if is_open else ""
            folded = f"<details{opened}><summary>{_text(title)}</summary>\n{inside}\n</details>"
            self.parts = [*before, folded]

    def missing(self, text: str) -> None:
        """Say what could not be shown, and why."""
        self.parts.append(f'<p class="missing">{_text(text)}</p>')

    def code(self, text: str) -> None:
        """Add text to be copied verbatim."""
        self.parts.append(f"<pre>{_text(text)}</pre>")

    def result(self, path: Path, model: str, trigger: str | None, arch: str | None = None) -> None:
        """Name a LoRA's file, or a whole model's folder, and how to load it; diffusers finds `model` by name."""
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

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table of `str` values, None as a dash. A header of empty names is left out."""
        head = f"<thead><tr>{''.join(map(column_name, header))}</tr></thead>" if any(header) else ""
        body = "".join(
            f"<tr>{''.join(_cell(cell, name) for cell, name in zip(row, header, strict=True))}</tr>" for row in rows
        )
        kind = ' class="facts"' if not head else ' class="stacking"' if len(header) >= STACKED_COLUMNS else ""
        self.parts.append(f'<div class="wide"><table{kind}>{head}<tbody>{body}</tbody></table></div>')

    def curves(self, title: str, series: Mapping[str, Points], **options: Any) -> None:
        """Add a `charts.line_chart`."""
        if any(math.isfinite(value) for points in series.values() for _, value in points):
            self.parts.append(line_chart(title, series, **options))
        else:
            self.missing(f"{title}: there is nothing to show")

    def bars(self, title: str, bars: Mapping[str, Mapping[str, float]], **options: Any) -> None:
        """Add a `charts.bar_chart`."""
        self.parts.append(bar_chart(title, bars, **options))

    def heat_map(self, title: str, rows: Sequence[str], columns: Sequence[str], values: Grid, **options: Any) -> None:
        """Add a `charts.heat_map`."""
        if any(value is not None and math.isfinite(value) for row in values for value in row):
            self.parts.append(heat_map(title, rows, columns, values, **options))
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
        if not items:
            self.missing(f"{title}: there is nothing to show")
            return
        cells = "".join(f'<div class="head">{_text(name)}</div>' for name in header)
        cells += "".join(self._picture(caption, path) for caption, path in items)
        caption = f"<figcaption>{_text(title)}</figcaption>" if title else ""
        wrapping = " wrapping" if columns > 1 and not header else ""
        grid = f'<div class="grid{wrapping}" style="--columns: {columns:d}">{cells}</div>'
        self.parts.append(
            f'<figure class="gallery" style="width: min(100%, {columns * width:d}px)">{caption}{grid}</figure>'
        )

    def _picture(self, caption: str, path: Path) -> str:
        try:
            source = _data_uri(path) if self._samples_at is None else f"{self._samples_at}/{quote(path.name)}"
        except (OSError, ValueError) as error:
            text = _text(f"{caption}: cannot be read ({error})")
            return f'<figure><figcaption class="missing">{text}</figcaption></figure>'
        below = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
        return f'<figure><img alt="{_text(caption)}" src="{source}">{below}</figure>'

    def html(self) -> str:
        """Return the page so far."""
        head = (
            f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{_text(self._title)}</title><style>{STYLE}</style>"
        )
        body = "\n".join(self.parts)
        return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'

    def write(self, path: Path) -> Path:
        """Write the page atomically; returns `path`."""
        write_file(path, self.html().encode(errors="replace"))
        return path


def _text(text: object) -> str:
    return html.escape(str(text))


def _cell(value: object, column: str) -> str:
    text = "–" if value is None else str(value)
    kinds = ["short"] * (len(text) <= SHORT) + ["number"] * bool(NUMBER.fullmatch(text))
    attributes = f' class="{" ".join(kinds)}"' if kinds else ""
    attributes += f' data-label="{_text(column)}"' if column else ""
    return f"<td{attributes}>{_text(text)}</td>"


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
