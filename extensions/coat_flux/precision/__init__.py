"""How precise the casts of a run are, layer by layer, and which layers are better left out of FP8.

measure.py   one cast: local SQNR, underflow, saturation, share of the format's range
records.py   rows of `coat/precision.csv`: written by both hosts, read by the report
weights.py   frozen weights, measured while their original is in hand
moments.py   AdamW's moments, around its step
watch.py     takes what the guard's probe saw: writes rows, applies `activation.min_sqnr_db`
advice.py    the worst layers, and what to write into `activation.exclude`
picture.py   the heat map as a PNG
"""

from .measure import Measures
from .records import COLUMNS, FILE, KINDS, Row, as_cells, read_rows
from .watch import PrecisionWatch

__all__ = ["COLUMNS", "FILE", "KINDS", "Measures", "PrecisionWatch", "Row", "as_cells", "read_rows"]
