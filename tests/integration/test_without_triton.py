"""Windows and macOS, where PyTorch comes without triton: every test file is read, those of kernels skip themselves."""

import subprocess
import sys

from tests.architecture.sources import ROOT

COLLECT = """
import sys
sys.modules["triton"] = None  # importing it fails from here on
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", sys.argv[1], sys.argv[2]]))
"""


def test_all_tests_are_collected_without_triton():
    command = [sys.executable, "-c", COLLECT, str(ROOT), str(ROOT / "tests")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
