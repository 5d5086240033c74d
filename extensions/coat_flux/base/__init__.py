"""Shared basics: errors, atomic writes, tables, the log, output streams."""
