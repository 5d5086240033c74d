"""Runs one process entry of the stand-in: `python run.py TYPE` prints what happened."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from jobs.process.job import Job

if __name__ == "__main__":
    Job({"type": sys.argv[1], "training_folder": sys.argv[2]}).run()
