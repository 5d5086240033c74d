"""Bring the table of ai-toolkit's keys up to date: `python scripts/update_ai_toolkit_keys.py --ai-toolkit DIR`.

Reads which keys the checkout has, of which kind, with which defaults, writes them into
`extensions/coat_flux/config/ai_toolkit_keys.tsv`, and prints what changed. The columns that are written by hand are
carried over. A new key is one that the stand-alone trainer does not support: any value but the default is refused until
somebody says otherwise in its line. With `--check` nothing is written, and exit code 1 says that the table is out of
date.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from coat_flux.config.ai_toolkit_keys import COLUMNS, ROWS, TABLE, VERSION, read_source


def updated(root: Path) -> tuple[str, list[str]]:
    """The text of the table for a checkout, and a line for each change."""
    version, blocks = read_source(root)
    changes = [] if version == VERSION else [f"version: {VERSION} -> {version}"]
    alone = {row["block"] for row in ROWS if row["stand-alone"]}  # what the stand-alone trainer knows anything of
    rows = []
    for block, keys in blocks.items():
        old = {row["key"]: row for row in ROWS if row["block"] == block}
        for key in sorted({*keys, *old}):
            name, read, row = f"{block}.{key}", keys.get(key), old.get(key)
            if row is None:
                row = dict.fromkeys(COLUMNS, "") | {"block": block, "key": key}
                row |= {"stand-alone": "unsupported" if block in alone else "", "kind": read.kind}
                changes.append(f"added: {name} ({read.kind}, default {read.default or 'computed'})")
            elif read is None:
                if row["kind"] != "-":
                    changes.append(f"removed: {name}")
                    continue
            elif row["kind"] != read.kind:
                changes.append(f"changed kind: {name}: {row['kind']} -> {read.kind}")
            if read is not None:
                row = row | {"kind": read.kind, "default": read.default or row["default"]}
                if (before := old.get(key, row)["default"]) != row["default"]:
                    changes.append(f"changed default: {name}: {before or 'computed'} -> {row['default']}")
            rows.append("\t".join(row[column] for column in COLUMNS))
    head = f"# ai-toolkit {version} (made by scripts/update_ai_toolkit_keys.py)"
    return "\n".join([head, "\t".join(COLUMNS), *rows]) + "\n", changes


def main() -> int:
    """Write the table, or with --check only compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("AI_TOOLKIT_ROOT")
    parser.add_argument("--ai-toolkit", metavar="DIR", default=default, required=default is None)
    parser.add_argument("--check", action="store_true", help="only say what would change")
    args = parser.parse_args()
    text, changes = updated(Path(args.ai_toolkit))
    print("\n".join(changes) or "nothing changed")
    if args.check:
        return 1 if changes else 0
    TABLE.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
