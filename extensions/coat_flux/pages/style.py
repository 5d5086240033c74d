"""The style sheet of our pages: light and dark by the reader's setting, from 320 pixels up."""

from __future__ import annotations

__all__ = ["SERIES_COLOURS", "STYLE"]

SERIES_COLOURS = 8

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
