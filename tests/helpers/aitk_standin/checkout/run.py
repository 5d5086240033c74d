"""Runs a process entry of the stand-in: `python run.py ENTRY.json`."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from jobs.process.job import Job

if __name__ == "__main__":
    Job(json.loads(Path(sys.argv[1]).read_text())).run()
