"""Self-contained HTML pages with tables, charts and pictures; nothing in them comes from a network.

page.py      the page and what can be put on it
style.py     its style sheet, light and dark
charts.py    line charts, as HTML and SVG
pictures.py  image files, made small enough to be embedded
"""

from .page import Page

__all__ = ["Page"]
