"""The web UI's trainer: it asks at set places whether a user wants the job to end, and ends it by an exception."""

from extensions_built_in.sd_trainer.SDTrainer import SDTrainer


class DiffusionTrainer(SDTrainer):
    is_ui_trainer = False
    requests = frozenset()  # "stop", "return_to_queue": what the database of the web UI holds

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_stopping = False
        self.status = "running"

    def should_stop(self):
        return self.is_ui_trainer and "stop" in self.requests

    def should_return_to_queue(self):
        return self.is_ui_trainer and "return_to_queue" in self.requests

    def maybe_stop(self):
        for asked, status in ((self.should_stop(), "stopped"), (self.should_return_to_queue(), "queued")):
            if asked:
                self.status, self.is_stopping = status, True
                raise Exception(f"the job is {status}")

    def on_error(self, error):
        super().on_error(error)
        if isinstance(error, KeyboardInterrupt):
            self.status = "stopped"
        elif not self.is_stopping:
            self.status = "error"

    def hook_before_train_loop(self):
        super().hook_before_train_loop()
        self.maybe_stop()

    def sample_step_hook(self, number, total):
        super().sample_step_hook(number, total)
        self.maybe_stop()

    def sample(self, step=None, is_first=False):
        self.maybe_stop()
        super().sample(step, is_first)
        self.maybe_stop()

    def save(self, step=None):
        self.maybe_stop()
        super().save(step)
        self.maybe_stop()

    def end_step_hook(self):
        super().end_step_hook()
        self.maybe_stop()
