"""What every other package may use: errors, atomic writes, tables, the log, output streams."""
