from toolkit.extension import process_classes


class Job:
    """One job with one process; built first, run later."""

    name = "standin_job"

    def __init__(self, entry):
        import jobs.process  # noqa: F401  (ai-toolkit has loaded its processes before any extension)

        classes = process_classes()
        if entry["type"] not in classes:
            raise ValueError(f"Unknown process type: {entry['type']}")
        self.raw_config = {"job": "extension", "config": {"name": self.name, "process": [entry]}}
        self.process = [classes[entry["type"]](0, self, entry)]

    def run(self):
        for process in self.process:
            process.run()
