"""What a user may ask for: the `coat:` block, the job file, and the job as the stand-alone trainer sees it."""

from .check import require_packages
from .coat import COATConfig
from .findings import ConfigError
from .job import JobConfig
from .job_file import load_job_yaml, shipped, shipped_folder

__all__ = [
    "COATConfig",
    "ConfigError",
    "JobConfig",
    "load_job_yaml",
    "require_packages",
    "shipped",
    "shipped_folder",
]
