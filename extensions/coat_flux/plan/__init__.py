"""`coat-flux plan`: memory, disk and time of a job before it runs, without a download."""
