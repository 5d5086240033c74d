"""What a user may ask for: the `coat:` block, the job file, and the job as the stand-alone trainer sees it."""

from .coat_config import COATConfig
from .findings import ConfigError

__all__ = ["COATConfig", "ConfigError"]
