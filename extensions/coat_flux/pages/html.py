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
from .charts import SHORT, Grid, Points, heat_map, line_chart, table_head

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
    """A page built from top to bottom; pictures are at `samples_at`, or embedded. `parts` are its HTML so far."""

    def __init__(self, title: str, subtitle: str = "", samples_at: str | None = None):
        self.title, self._samples_at = title, samples_at
        self.parts = [f"<h1>{_text(title)}</h1>"]
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
        head, kind = table_head(header), ""
        if not any(header):
            head, kind = "", ' class="facts"'
        elif len(header) >= STACKED_COLUMNS:
            kind = ' class="stacking"'
        lines = []
        for row in rows:
            cells = [_cell(value, name) for value, name in zip(row, header, strict=True)]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        body = "".join(lines)
        self.parts.append(f'<div class="wide"><table{kind}>{head}<tbody>{body}</tbody></table></div>')

    def curves(self, title: str, series: Mapping[str, Points], **options: Any) -> None:
        """Add a `charts.line_chart`."""
        if any(math.isfinite(value) for points in series.values() for _, value in points):
            self.parts.append(line_chart(title, series, **options))
        else:
            self.missing(f"{title}: there is nothing to show")

    def heat_map(self, title: str, rows: Sequence[str], columns: Sequence[str], values: Grid, **options: Any) -> None:
        """Add a `charts.heat_map`."""
        self.parts.append(heat_map(title, rows, columns, values, **options))

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
        cells = "".join(f'<div class="head">{_text(name)}</div>' for name in header)
        cells += "".join(self._picture(caption, path) for caption, path in items)
        caption = f"<figcaption>{_text(title)}</figcaption>" if title else ""
        wrapping = " wrapping" if columns > 1 and not header else ""
        grid = f'<div class="grid{wrapping}" style="--columns: {columns:d}">{cells}</div>'
        self.parts.append(
            f'<figure class="gallery" style="width: min(100%, {columns * width:d}px)">{caption}{grid}</figure>'
        )

    def _picture(self, caption: str, path: Path) -> str:
        if self._samples_at is not None:
            source = f"{self._samples_at}/{quote(path.name)}"
        else:
            try:
                source = _data_uri(path)
            except (OSError, ValueError) as error:
                text = _text(f"{caption}: cannot be read ({error})")
                return f'<figure><figcaption class="missing">{text}</figcaption></figure>'
        below = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
        return f'<figure><img alt="{_text(caption)}" src="{source}">{below}</figure>'

    def html(self, head: str = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">') -> str:
        """Return the page so far; `head` goes into its head."""
        body = "\n".join(self.parts)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{_text(self.title)}</title><style>{STYLE}</style>{head}</head><body>\n{body}\n</body></html>\n"
        )

    def write(self, path: Path) -> Path:
        """Write the page atomically; returns `path`."""
        write_file(path, self.html().encode(errors="replace"))
        return path


def _text(text: object) -> str:
    return html.escape(str(text))


def _cell(value: object, column: str) -> str:
    text = "–" if value is None else str(value)
    kinds = []
    if len(text) <= SHORT:
        kinds.append("short")
    if NUMBER.fullmatch(text):
        kinds.append("number")
    label = f' data-label="{_text(column)}"' if column else ""
    return f'<td class="{" ".join(kinds)}"{label}>{_text(text)}</td>'


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


# Light and dark by the reader's setting, from 320 pixels up.
STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1f2328; --quiet: #59636e; --line: #d1d9e0; --raised: #f6f8fa;
  --good: #0b4d1f; --good-paper: #dafbe1; --bad: #82071e; --bad-paper: #ffebe9;
  --open: #5c4400; --open-paper: #fff3bf; --plain: #0a3069; --plain-paper: #ddf4ff;
  --c0: #1f6feb; --c1: #c2500a; --c2: #1a7f37; --c3: #8250df; --c4: #cf222e; --c5: #0e7490;
  --c6: #8f5f00; --c7: #bf3989;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0d1117; --ink: #e6edf3; --quiet: #9198a1; --line: #3d444d; --raised: #161b22;
    --good: #aff5b4; --good-paper: #0f3a1d; --bad: #ffdcd7; --bad-paper: #5a1a1a;
    --open: #f8e3a1; --open-paper: #4a3600; --plain: #cae8ff; --plain-paper: #0c2d54;
    --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #bc8cff; --c4: #ff7b72; --c5: #39c5cf;
    --c6: #d29922; --c7: #f778ba;
  }
}
* { box-sizing: border-box; }
body {
  font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere;
}
h1, h2, h3, h4 { line-height: 1.25; margin: 1.6em 0 .5em; }
h1 { margin-top: .25em; }
.subtitle, .missing, figcaption, .axis { color: var(--quiet); }
.verdict { font-size: 1.1rem; font-weight: 600; padding: .75rem 1rem; border-left: .4rem solid; border-radius: .3rem; }
.verdict.good { color: var(--good); background: var(--good-paper); }
.verdict.bad { color: var(--bad); background: var(--bad-paper); }
.verdict.open { color: var(--open); background: var(--open-paper); }
.verdict.plain { color: var(--plain); background: var(--plain-paper); }
details { border-top: 1px solid var(--line); padding: .25rem 0; }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: .4rem 0; font-size: 1.1rem; font-weight: 600; }
summary:focus-visible { outline: 2px solid var(--c0); }
.wide { overflow-x: auto; margin: 1em 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: left; vertical-align: top; }
thead th { background: var(--raised); }
.short { overflow-wrap: normal; }
td.short { white-space: nowrap; }
.number, .heat td { text-align: right; }
.facts td { text-align: left; white-space: normal; }
.facts td:first-child { color: var(--quiet); overflow-wrap: normal; }
pre {
  padding: .75rem; border: 1px solid var(--line); border-radius: .3rem; background: var(--raised);
  font-size: .8rem; white-space: pre-wrap;
}
code { font-size: .9em; background: var(--raised); padding: .1em .3em; border-radius: .2rem; }
figure { margin: 1.25em 0; }
.chart > figcaption { color: var(--ink); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .8rem; }
.legend span::before {
  content: ""; display: inline-block; width: 1.2em; height: .25em; border-radius: .1em; margin-right: .4em;
  vertical-align: middle; background: var(--c);
}
.legend .line::before { width: 0; height: 1em; border-left: 2px dashed var(--ink); background: none; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .6rem; margin-top: .5rem; }
.bars span { font-size: .8rem; font-variant-numeric: tabular-nums; }
.track { position: relative; display: flex; }
.track i { background: var(--c); }
.track b { position: absolute; top: -.15rem; bottom: -.15rem; border-left: 2px dashed var(--ink); }
.axis { font-size: .75rem; font-variant-numeric: tabular-nums; }
.x.axis { text-align: right; padding-top: 1.4rem; }
.plot { position: relative; height: 15rem; margin: .5rem 1.5rem 0 var(--ticks); }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; stroke: var(--c); stroke-width: 1.75; stroke-linejoin: round; }
.plot path { vector-effect: non-scaling-stroke; }
.plot path.grid { stroke: var(--line); stroke-width: 1; }
.plot path.band { fill: var(--c); stroke: none; opacity: .18; }
.plot path.faint { stroke-width: 1; opacity: .45; }
.plot path.dots { stroke-width: 5; stroke-linecap: round; }
.plot path.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.plot span { position: absolute; white-space: nowrap; line-height: 1; }
.plot .tick-y { right: calc(100% + .4rem); transform: translateY(50%); }
.plot .tick-x { top: calc(100% + .4rem); transform: translateX(-50%); }
.plot .note { top: 0; color: var(--ink); background: var(--paper); padding: .1rem .25rem; }
.plot .note.left { transform: translateX(-100%); }
.gallery { display: inline-block; vertical-align: top; margin: .5rem 0 .75rem; padding-right: 1rem; }
.gallery > figcaption { color: var(--ink); font-size: .9rem; margin-bottom: .3rem; }
.grid { display: grid; gap: .4rem; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }
.grid figure { margin: 0; }
.grid figcaption, .head { font-size: .8rem; }
.head { font-weight: 600; text-align: center; }
img { display: block; width: 100%; height: auto; border-radius: .2rem; }
@media (max-width: 40rem) {
  body { padding: .75rem; }
  h1 { font-size: 1.5rem; }
  .plot { height: 12rem; }
  .gallery { padding-right: 0; }
  .wrapping { grid-template-columns: repeat(auto-fill, minmax(5.2rem, 1fr)); }
  .heat { font-size: .75rem; }
  .heat th, .heat td { padding: .15rem .25rem; }
  .heat thead th { writing-mode: vertical-rl; }
  .stacking thead { display: none; }
  .stacking, .stacking tbody { display: block; }
  .stacking tr { display: block; border: 1px solid var(--line); margin-bottom: .6rem; }
  .stacking td { display: flex; gap: 1rem; justify-content: space-between; border: 0; }
  .stacking td { text-align: right; white-space: normal; }
  .stacking td::before { content: attr(data-label); color: var(--quiet); text-align: left; flex: none; }
}
"""
