"""What a user may ask for: the `coat:` block, the job file, and the job as the stand-alone trainer sees it."""

from .coat import COATConfig
from .job import JobConfig

__all__ = ["COATConfig", "JobConfig"]
