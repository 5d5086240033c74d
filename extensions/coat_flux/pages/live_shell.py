"""The page around what `view` shows: buttons, and a script that asks for a new look every two seconds."""

from __future__ import annotations

import html

from .style import STYLE

__all__ = ["shell"]

BUTTONS = {
    "sample": ("Sample now", "draw the config's prompts after this step"),
    "save": ("Save now", "write a checkpoint after this step; save.max_step_saves_to_keep holds for it, too"),
    "stop": ("Stop after this step", "save and end, as Ctrl+C does; the same command goes on from there"),
}
OWN_STYLE = """
progress { width: 100%; height: 1rem; accent-color: var(--c0); }
.asks { display: flex; flex-wrap: wrap; gap: .5rem; margin: 1rem 0 .25rem; }
button {
  font: inherit; padding: .45rem .9rem; border: 1px solid var(--line); border-radius: .3rem; cursor: pointer;
  color: var(--ink); background: var(--raised);
}
button:hover:enabled, button:focus-visible { border-color: var(--c0); outline: 1px solid var(--c0); }
button:disabled { color: var(--quiet); cursor: default; border-style: dashed; }
button[name=stop]:enabled { color: var(--bad); background: var(--bad-paper); }
.grid.wrapping { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); }
"""
SCRIPT = """
const token = decodeURIComponent(location.hash.slice(1));
const live = document.getElementById('live'), note = document.getElementById('note');
const buttons = [...document.querySelectorAll('button')];
let shown = [];
function show(look) {
  while (live.children.length < look.parts.length) live.append(document.createElement('section'));
  [...live.children].forEach((section, i) => {
    const part = look.parts[i] || '', folded = section.querySelector('details');
    if (part === shown[i]) return;
    section.innerHTML = part;
    if (folded && section.querySelector('details')) section.querySelector('details').open = folded.open;
  });
  shown = look.parts;
  document.title = look.title;
  for (const button of buttons) button.disabled = !token || !look.takes.includes(button.name);
}
async function refresh() {
  try {
    show(await (await fetch('look')).json());
    if (note.dataset.lost) { note.textContent = ''; delete note.dataset.lost; }
  } catch {
    note.dataset.lost = '1';
    note.textContent = 'No answer: coat-flux watch, or the training it belongs to, has ended.';
    buttons.forEach(button => button.disabled = true);
  }
  setTimeout(refresh, 2000);
}
for (const button of buttons) button.addEventListener('click', async () => {
  button.disabled = true;
  const answer = await fetch('commands/' + button.name, {method: 'POST', headers: {'X-Coat-Token': token}});
  const text = note.textContent = await answer.text();
  setTimeout(() => { if (note.textContent === text) note.textContent = ''; }, 8000);
});
if (!token) note.textContent = 'Read only. The buttons need the whole address that coat-flux printed, with its # part.';
addEventListener('hashchange', () => location.reload());
refresh();
"""


def shell(name: str, folder: str, nonce: str) -> str:
    """The page.

    Args:
        name: of the run.
        folder: of the run, for the subtitle.
        nonce: that lets this script run, and no other.
    """
    buttons = "".join(
        f'<button type="button" name="{key}" title="{html.escape(title)}" disabled>{html.escape(text)}</button>'
        for key, (text, title) in BUTTONS.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)}</title><style>{STYLE}{OWN_STYLE}</style></head><body>"
        f'<h1>{html.escape(name)}</h1><p class="subtitle">{html.escape(folder)}</p>'
        f'<div class="asks">{buttons}</div><p id="note" class="missing" role="status"></p><main id="live"></main>'
        f'<script nonce="{nonce}">{SCRIPT}</script></body></html>\n'
    )
