"""Pages as a real browser lays them out: widths, what sticks out, contrast; in both colour schemes."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ["browser", "inspect_pages"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --hide-scrollbars"
)
SCHEMES = {"dark": "0", "light": "1"}
WIDTHS = (400, 1200)  # of a phone and of a desk, in pixels
TIMEOUT_S = 120

# Every page stands in a frame of each width; frames share the script's origin, so that it can look into them.
SCRIPT = r"""
const result = {};
function parse(text) {  // rgb(r g b / a), or color(srgb r g b / a) with shares of 1
  const n = text.match(/[\d.]+/g).map(Number), scale = text.startsWith('color(') ? 255 : 1;
  return [...n.slice(0, 3).map(v => v * scale), n.length > 3 ? n[3] : 1];
}
const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
const light = c => [0, 1, 2].map(i => c[i] / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const contrast = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
function paper(view, node) {
  const layers = [];
  for (let at = node; at; at = at.parentElement) layers.push(parse(view.getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 1]);
}
const name = node => `${node.tagName}.${node.getAttribute('class') || ''}: ${node.textContent.trim().slice(0, 50)}`;
for (const frame of document.querySelectorAll('iframe')) {
  const view = frame.contentWindow, page = frame.contentDocument, wrong = [];
  page.querySelectorAll('details').forEach(node => node.open = true);
  let texts = 0;
  if (page.scrollingElement.scrollWidth > view.innerWidth) wrong.push('scrolls sideways');
  for (const node of page.body.querySelectorAll('*')) {
    const box = node.getBoundingClientRect(), style = view.getComputedStyle(node);
    if (!box.width || style.visibility === 'hidden') continue;
    if (box.left < -0.5 || box.right > view.innerWidth + 0.5) wrong.push('outside: ' + name(node));
    if (style.overflowX !== 'visible' && node.scrollWidth > node.clientWidth + 1) wrong.push('clipped: ' + name(node));
    if (node.tagName === 'path' && node.getAttribute('class') === 'line' &&
        contrast(parse(style.stroke), paper(view, node)) < 3) wrong.push('pale line: ' + style.stroke);
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())) continue;
    texts += 1;
    const back = paper(view, node), ratio = contrast(over(parse(style.color), back), back) * style.opacity;
    if (ratio < 4.5) wrong.push('pale, ' + ratio.toFixed(2) + ': ' + name(node));
  }
  result[frame.name] = {dark: view.matchMedia('(prefers-color-scheme: dark)').matches, texts, wrong};
}
const out = document.createElement('output');
out.textContent = JSON.stringify(result);
document.body.replaceChildren(out);
"""


def browser() -> str:
    """The browser of this machine; skips the test where there is none."""
    known = [os.environ.get("COAT_BROWSER"), *map(shutil.which, NAMES)]
    mac = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
    if mac.exists():
        known.append(str(mac))
    for path in known:
        if path:
            return path
    pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (or set COAT_BROWSER)")


def inspect_pages(pages: dict[str, str], scheme: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Lay out pages (name → HTML) in the scheme "light" or "dark", all folded sections open; `folder` is for its files.

    Returns:
        "name width" → whether the page was `dark`, how many `texts` were looked at, and what is `wrong`: outside the
        window, clipped by a box with a scroll bar, text or lines too pale.
    """
    frames = "".join(
        f'<iframe name="{name} {width}" style="width:{width}px;height:3000px;border:0" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for name, page in pages.items()
        for width in WIDTHS
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "frames.html"
    script = f"<script>addEventListener('load', () => {{{SCRIPT}}})</script>"
    file.write_text(f'<!DOCTYPE html><meta charset="utf-8">{script}<body>{frames}</body>', encoding="utf-8")
    options = [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    command = [browser(), *QUIET.split(), *options, "--window-size=1300,1000", "--dump-dom", file.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT_S, check=False)
    output = re.search(r"<output>(.*?)</output>", run.stdout, re.DOTALL)
    assert output, f"the browser did not finish (exit code {run.returncode}):\n{run.stderr[-2000:]}"
    return json.loads(html.unescape(output[1]))
