"""One self-contained HTML file: text is escaped, and a policy keeps browsers from fetching anything.

In charts, lines are an SVG that stretches, and text above it keeps its size; colours are the style sheet's.
"""

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
from typing import Literal, TypeAlias
from urllib.parse import quote

from PIL import Image, ImageOps

from ..base.files import write_file
from ..blocks.models import FLUX, FLUX2

Tone: TypeAlias = Literal["good", "bad", "open", "plain"]
Points: TypeAlias = Sequence[tuple[float, float]]
Band: TypeAlias = Sequence[tuple[float, float, float]]

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NUMBER = re.compile(r"–|[-+±~<]?(>=)?[\d.,]+(e-?\d+)?( ?(%|dB|GB|MB|s))?")
SHORT = 12  # characters of a cell or a header's word that is never broken
STACKED_COLUMNS = 4  # columns from which rows become blocks on a narrow screen
SMALL_BYTES = 192 * 1024  # of a picture embedded unchanged
LONGEST_SIDE = 448  # of a picture, in pixels
QUALITY = 82
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")

SERIES_COLOURS = 8  # --c0 to --c7
MOST_POINTS = 1200  # per series
MOST_DOTS = 30  # of a series drawn with dots
TICKS = 6  # approximate number per axis
SIDE = 1000  # of the drawing, in its own units; 10 are 1 %
MARGIN = 0.04  # of the y axis, at both ends
NOISE = 1e-9  # of divisions that should be whole


class Page:
    """A page built from top to bottom; pictures are embedded, or at `samples_at`."""

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
        """Add the result in one sentence."""
        self.parts.append(f'<p class="verdict {tone}" role="status">{escape(text)}</p>')

    @contextmanager
    def details(self, title: str, *, is_open: bool = False) -> Iterator[None]:
        """Collapse what is added inside the `with` block."""
        before, self.parts = self.parts, []
        try:
            yield
        finally:
            head = f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>"
            self.parts = [*before, "\n".join([head, *self.parts, "</details>"])]

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
        hint = f" Put the trigger word in your prompts: {trigger}." if trigger else ""
        self.paragraph(f"ComfyUI: copy the file to ComfyUI/models/loras and load it with a Load LoRA node.{hint}")
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
        head, table_class = "", ' class="facts"'
        if any(header):
            table_class = ' class="stacking"' if len(header) >= STACKED_COLUMNS else ""
            for name in header:
                name_class = ' class="short"' if max(map(len, name.split()), default=0) <= SHORT else ""
                head += f"<th{name_class}>{escape(name)}</th>"
            head = f"<thead><tr>{head}</tr></thead>"
        body = ""
        for row in rows:
            cells = ""
            for value, column in zip(row, header, strict=True):
                text, style = "–" if value is None else str(value), ""
                if shades is not None and isinstance(value, float):
                    text = f"{value:.1f}"
                    red, green = shades
                    share = min(max((value - red) / (green - red), 0.0), 1.0)
                    shade = f"var(--{'bad' if share < 0.5 else 'good'}-paper) {abs(200 * share - 100):.0f}%"
                    style = f' style="background: color-mix(in srgb, {shade}, var(--paper))"'
                classes = ["short"] if len(text) <= SHORT else []
                classes += ["number"] if NUMBER.fullmatch(text) else []
                label = f' data-label="{escape(column)}"' if column else ""
                cells += f'<td class="{" ".join(classes)}"{label}{style}>{escape(text)}</td>'
            body += f"<tr>{cells}</tr>"
        self.parts.append(f'<div class="wide"><table{table_class}>{head}<tbody>{body}</tbody></table></div>')

    def curves(
        self,
        title: str,
        series: Mapping[str, Points],  # name → points (x, y), x ascending
        *,
        y: str,
        log_y: bool = False,
        band: Mapping[str, Band] | None = None,  # name → (x, low, high)
        faint: str = "",  # the series drawn thin
        marks: Mapping[float, str] | None = None,  # x → label of a dashed vertical line
    ) -> None:
        """Add a line chart over steps, or say that it is empty.

        Points that are not finite, or not positive on a logarithmic axis, leave gaps. Long series are thinned.
        """
        band, marks = band or {}, marks or {}
        lines = {}
        xs, ys = list(marks), []
        for name, points in series.items():
            with_gaps = [(at, math.nan if value <= 0 and log_y else value) for at, value in points]
            drawable = [(at, value) for at, value in with_gaps if math.isfinite(value)]
            if drawable:
                lines[name] = thinned(with_gaps)
                xs += [at for at, _ in drawable]
                ys += [value for _, value in drawable]
                for _, low, high in band.get(name, ()):
                    ys += [low, high]
        if not lines:
            self.missing(f"{title}: there is nothing to show")
            return
        x_axis = _Axis(xs, margin=0.0, whole=True)
        y_axis = _Axis(ys, margin=MARGIN, log=log_y)
        ticks = y_axis.ticks()
        grid = "".join(f"M0 {SIDE - at:g}H{SIDE}" for at, _ in ticks)
        drawing = [f'<path class="grid" d="{grid}"/>']
        legend = []
        for number, (name, points) in enumerate(lines.items()):
            colour = f' style="--c: var(--c{number % SERIES_COLOURS})"'
            legend.append(f"<span{colour}>{escape(name)}</span>")
            if name in band:
                above = [(at, high) for at, _, high in band[name]]
                below = [(at, low) for at, low, _ in reversed(band[name])]
                drawing.append(f'<path class="band"{colour} d="{_line(above + below, x_axis, y_axis)}Z"/>')
            kind = "faint" if name == faint else "line"
            drawing.append(f'<path class="{kind}"{colour} d="{_line(points, x_axis, y_axis)}"/>')
            if len(points) <= MOST_DOTS:
                finite = [(at, value) for at, value in points if math.isfinite(value)]
                dots = "".join(f"M{x_axis.place(at):g} {SIDE - y_axis.place(value):g}h0" for at, value in finite)
                drawing.append(f'<path class="dots"{colour} d="{dots}"/>')
        labels = []
        for at, text in ticks:
            labels.append(f'<span class="tick-y axis" style="bottom: {at / 10:g}%">{text}</span>')
        for at, text in x_axis.ticks():
            labels.append(f'<span class="tick-x axis" style="left: {at / 10:g}%">{text}</span>')
        for at, text in marks.items():
            place = x_axis.place(at)
            drawing.append(f'<path class="mark" d="M{place:g} 0V{SIDE}"/>')
            side = " left" if place > SIDE / 2 else ""
            labels.append(f'<span class="note axis{side}" style="left: {place / 10:g}%">{escape(text)}</span>')
        width = max(len(text) for _, text in ticks) * 0.5 + 0.8
        paths = "".join(drawing)
        svg = f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">{paths}</svg>'
        plot = f'<div class="plot" style="--ticks: {width:g}rem">{svg}{"".join(labels)}</div>'
        body = f'<div class="y axis">{escape(y)}</div>{plot}<div class="x axis">step</div>'
        self._figure(title, legend if len(legend) > 1 or band else [], body)

    def bars(self, title: str, bars: Mapping[str, Mapping[str, float]], expected: Mapping[str, float]) -> None:
        """Add stacked bars: name → part → length; a line marks the length that the plan `expected`."""
        totals = {name: sum(parts.values()) for name, parts in bars.items()}
        scale = 100 / (max([*totals.values(), *expected.values()], default=0) or 1)  # percent of the longest
        colours: dict[str, str] = {}
        rows = []
        for name, parts in bars.items():
            rows.append(f'<span>{escape(name)}</span><div class="track">')
            for part, size in parts.items():
                number = len(colours)
                next_colour = f"var(--c{number})" if number < SERIES_COLOURS else "var(--quiet)"
                colour = colours.setdefault(part, next_colour)
                rows.append(f'<i style="--c: {colour}; width: {size * scale:.2f}%"></i>')
            if name in expected:
                rows.append(f'<b style="left: {expected[name] * scale:.2f}%"></b>')
            rows.append(f"</div><span>{totals[name]:.2f}</span>")
        legend = [f'<span style="--c: {colour}">{escape(name)}</span>' for name, colour in colours.items()]
        if expected:
            legend.append('<span class="line">predicted by coat-flux plan</span>')
        self._figure(title, legend, f'<div class="bars">{"".join(rows)}</div>')

    def _figure(self, title: str, legend: Sequence[str], body: str) -> None:
        label = escape(title)
        names = f'<div class="legend">{"".join(legend)}</div>' if legend else ""
        head = f'<figure class="chart" role="img" aria-label="{label}"><figcaption>{label}</figcaption>'
        self.parts.append(f"{head}{names}{body}</figure>")

    def images(
        self,
        title: str,
        items: Sequence[tuple[str, Path]],
        *,
        columns: int = 4,
        header: Sequence[str] = (),
        width: int = 160,
        marked: Sequence[int] = (),
    ) -> None:
        """Add a grid of reduced pictures (caption, file), in columns of `width` pixels; unreadable ones are named.

        On a narrow screen rows wrap, unless there is a header or a single column. Those `marked` are framed.
        """
        cells = "".join(f'<div class="head">{escape(name)}</div>' for name in header)
        for number, (text, path) in enumerate(items):
            try:
                source = _data_uri(path) if self._samples_at is None else f"{self._samples_at}/{quote(path.name)}"
                label = f"<figcaption>{escape(text)}</figcaption>" if text else ""
                picture = f'<img alt="{escape(text)}" src="{source}">{label}'
            except (OSError, ValueError) as error:
                picture = f'<figcaption class="missing">{escape(f"{text}: cannot be read ({error})")}</figcaption>'
            cells += f'<figure class="marked">{picture}</figure>' if number in marked else f"<figure>{picture}</figure>"
        caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
        wrapping = " wrapping" if columns > 1 and not header else ""
        grid = f'<div class="grid{wrapping}" style="--columns: {columns:d}; --least: {width // 2:d}px">{cells}</div>'
        style = f"width: min(100%, {columns * width:d}px)"
        self.parts.append(f'<figure class="gallery" style="{style}">{caption}{grid}</figure>')

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


def thinned(points: Points) -> Points:
    """About `MOST_POINTS` of the points: the lowest and the highest of each stretch, in order."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    peaks = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        finite = [(at, value) for at, value in part if math.isfinite(value)] or part[:1]
        peaks += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return peaks


class _Axis:
    """An axis around values, from `low` to `high`, exponents of 10 if `log`; `whole`: ticks are whole numbers."""

    def __init__(self, values: Sequence[float], *, margin: float, log: bool = False, whole: bool = False) -> None:
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * margin
        if high == low:
            room = 0.5 if log else abs(low) / 2
            if room == 0:  # a count that stays 0 has no negative side
                high = 1.0
        self.low, self.high, self.log, self.whole = low - room, high + room, log, whole

    def place(self, value: float) -> float:
        """The position of a value, from 0 to `SIDE`."""
        at = math.log10(value) if self.log else value
        return round((at - self.low) / (self.high - self.low) * SIDE, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """(position, label) of round numbers: powers of 10 if at least two fit, else 1, 2 or 5 times one apart."""
        low, high = self.low, self.high
        if self.log:
            exponents = range(math.ceil(low - NOISE), math.floor(high + NOISE) + 1)
            every = math.ceil(len(exponents) / TICKS)
            powers = [10.0**exponent for exponent in exponents if exponent % every == 0]
            if len(powers) > 1:
                return [(self.place(power), _label(power, power, power)) for power in powers]
            low, high = 10**low, 10**high
        rough_step = (high - low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough_step))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough_step * (1 - NOISE))
        if self.whole:
            step = max(step, 1.0)
        first, last = math.ceil(low / step - NOISE), math.floor(high / step + NOISE)
        values = [step * i for i in range(first, last + 1) if i > 0 or not self.log]
        largest = max(map(abs, values), default=0.0)
        return [(self.place(value), _label(value, largest, step)) for value in values]


def _label(value: float, largest: float, step: float) -> str:
    """A tick's label on an axis up to `largest`: 1,000 and 0.05, but 1e-5."""
    if largest == 0 or 1e-3 <= largest < 1e7:
        decimals = max(0, -math.floor(math.log10(step) + NOISE))
        return f"{value:,.{decimals}f}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+", "e")


def _line(points: Points, x_axis: _Axis, y_axis: _Axis) -> str:
    """An SVG path; y grows downward there."""
    path, pen = [], "M"
    for at, value in points:
        if math.isfinite(value):
            path.append(f"{pen}{x_axis.place(at):g} {SIDE - y_axis.place(value):g}")
            pen = "L"
        else:
            pen = "M"
    return "".join(path)
