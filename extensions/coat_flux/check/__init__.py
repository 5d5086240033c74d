"""What is wrong with a job, for either host, before anything is loaded."""

from ..config.findings import Finding
from .job import HOSTS, check_here, check_job_dict, check_job_file, find_toolkit, require_here

__all__ = ["HOSTS", "Finding", "check_here", "check_job_dict", "check_job_file", "find_toolkit", "require_here"]
