"""`coat-flux report`: one HTML page of a run, made from the files in its folder.

run.py        what is in the folder of a run, of either host, and why something is not
logs.py       losses, learning rate and times by step
page.py       the page, section by section
memory.py     the section on memory
precision.py  the section on FP8
"""

from .page import write_report
from .run import NotARun

__all__ = ["NotARun", "write_report"]
