"""A saved LoRA as others read it: the check after every save, and conversion between key layouts."""

from .check import ExportReport, check_export
from .convert import convert_file
from .files import ExportError

__all__ = ["ExportError", "ExportReport", "check_export", "convert_file"]
