"""A process that is killed, or whose disk is full or forbidden, at any moment loses no committed checkpoint.

Afterwards the run folder holds the set before or the new one, whole; a resumed run ends as the one never stopped.
"""

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coat_flux.base.interrupts import Interrupts
from coat_flux.saves.commit import commit, damage, newest_set
from coat_flux.saves.errors import SaveError
from coat_flux.saves.repair import repair
from coat_flux.trainers.standalone import trainer
from coat_flux.trainers.standalone.progress import RunLog
from coat_flux.trainers.standalone.saving import find_resume_point, identity_of, save
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.trainers.standalone.workers import Workers
from coat_flux.watch.live import LiveRun
from coat_flux.watch.phases import PhaseTracker
from tests.helpers.engine_job import FEW_LINEARS, ON_DISK, engine_job, tiny_place
from tests.reliability.forks import KILLED, at_operation, content, fork, quick_forks, wait

resource = pytest.importorskip("resource", reason="needs a system with os.fork, with which a kill costs milliseconds")

RANDOM_KILLS = 5
STEPS = 5
COAT = {"optimizer": {"stochastic_rounding": True}, "memory": {"log_memory_stats": False}}
SET_FILES = ("published.safetensors", "optimizer.pt", "lora.safetensors", "ema.safetensors", "state.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with tiny_place(tmp_path_factory.mktemp("kills"), 2) as place, quick_forks():
        yield place


def job_of(name: str, place: dict[str, Path], every: int = 1) -> dict[str, Any]:
    train = {"steps": STEPS, "ema_config": {"use_ema": True, "ema_decay": 0.8}, "lr_scheduler": "cosine"}
    save = {"save_every": every, "max_step_saves_to_keep": 2}
    return engine_job(name, **place, coat=COAT, network=FEW_LINEARS, train=train, dataset=ON_DISK, save=save)


def contents(folder: Path) -> dict[str, Any]:
    return {name: content(folder / name) for name in SET_FILES}


# -- every file operation of a save ----------------------------------------------------------------------------------
class OneSave:
    """A session with one step saved and a second one done, whose save is then tried in children."""

    def __init__(self, place: dict[str, Path]):
        job = COATTrainer(job_of("save", place)).job
        self.run = job.folder
        workers = Workers("cpu")
        phases, log = PhaseTracker(workers.device, None), RunLog(job, workers.device, active=False)
        live = LiveRun(job.folder, 0, job.train.steps, samples=False)
        self.session: Session = Session(job, workers, log, phases, None, identity_of(job, 1), live)
        batches = iter(self.session.sampler)
        trainer.train_step(self.session, batches, Interrupts(print))
        self.save()
        self.before = contents(newest_set(self.run))
        trainer.train_step(self.session, batches, Interrupts(print))
        self.kept = self.run.with_name("kept")
        shutil.copytree(self.run, self.kept)
        assert wait(fork(self.save)) == 0
        self.after = contents(newest_set(self.run))
        self.reset()
        workers.close()

    def save(self) -> None:
        save(self.session, final=False)

    def save_or_write(self, message: Path) -> None:
        """Write the message of a failed save."""
        try:
            self.save()
        except SaveError as error:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            message.write_text(str(error), encoding="utf-8")

    def reset(self, folder: Path | None = None) -> None:
        shutil.rmtree(self.run)
        shutil.copytree(folder or self.kept, self.run)

    def in_child(self, number: int, act: Callable[[], None], work: Callable[[], None]) -> int:
        def child() -> None:
            at_operation(number, self.run, act)
            work()

        return wait(fork(child))

    def check(self) -> str:
        """The folder resumes from the previous or the new set, whole and published: "before" or "after"."""
        repair(self.run)
        point = find_resume_point(self.run, "save")
        assert damage(point.state.folder) is None
        found = contents(point.state.folder)
        assert found in (self.before, self.after)
        assert content(point.path) == found["published.safetensors"]
        assert (self.run / "optimizer.pt").read_bytes() == found["optimizer.pt"]
        sets = {path.name for path in (self.run / "coat").iterdir()}
        assert sets == {"state-000000001", point.state.folder.name}
        assert not list(self.run.rglob(".*"))
        return "before" if found == self.before else "after"


@pytest.fixture(scope="module")
def one_save(place: dict[str, Path]) -> OneSave:
    return OneSave(place)


def die() -> None:
    os._exit(KILLED)


def every_operation(attempt: Callable[[int], bool], stride: int = 1) -> int:
    """Call `attempt` with 0, 1, ... until it reports that the operation does not exist; returns how many there are."""
    return next(number for number in range(0, 1000, stride) if not attempt(number))


def test_a_kill_at_any_file_operation_of_a_save_leaves_a_whole_checkpoint(one_save):
    seen: list[str] = []

    def attempt(number: int) -> bool:
        one_save.reset()
        code = one_save.in_child(number, die, one_save.save)
        assert code in (0, KILLED)
        seen.append(one_save.check())
        return code == KILLED

    count = every_operation(attempt)
    assert count > 30
    change = seen.index("after")
    assert 10 < change < count
    assert seen == ["before"] * change + ["after"] * (count + 1 - change)


def test_a_kill_while_a_step_is_saved_again_leaves_one_of_the_two(place, tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept"

    def save(text: str) -> None:
        commit(run, 1, lambda folder: (folder / "lora").write_text(text, encoding="utf-8") and None, {"out": "lora"})

    save("old")
    shutil.copytree(run, kept)

    def child(number: int) -> None:
        at_operation(number, run, die)
        save("new")

    def attempt(number: int) -> bool:
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        code = wait(fork(lambda: child(number)))
        repair(run)
        folder = newest_set(run)
        assert damage(folder) is None
        texts = {path.read_text(encoding="utf-8") for path in (folder / "lora", run / "out")}
        assert texts in ({"old"}, {"new"})
        assert code == KILLED or texts == {"new"}
        assert [path.name for path in (run / "coat").iterdir()] == [folder.name]
        return code == KILLED

    assert every_operation(attempt) > 20


def test_a_kill_at_any_file_operation_of_a_repair_is_repaired(one_save):
    """The save is killed right after its commit, and then the start that would have put it right."""
    replace = os.replace

    def commit_and_die(source: Any, target: Any) -> None:
        replace(source, target)
        os._exit(KILLED)

    def killed_save() -> None:
        os.replace = commit_and_die
        one_save.save()

    one_save.reset()
    assert wait(fork(killed_save)) == KILLED
    committed = shutil.copytree(one_save.run, one_save.run.with_name("committed"))

    def attempt(number: int) -> bool:
        one_save.reset(committed)
        code = one_save.in_child(number, die, lambda: repair(one_save.run) and None)
        assert code in (0, KILLED)
        assert one_save.check() == "after"
        return code == KILLED

    assert every_operation(attempt) > 10


@pytest.mark.parametrize(
    ("number", "remedy", "stride"),
    [(errno.ENOSPC, "free some of this disk", 2), (errno.EACCES, "make the folder writable", 8)],
    ids=["full", "forbidden"],
)
def test_a_refused_file_operation_of_a_save_is_told_and_leaves_a_whole_checkpoint(one_save, number, remedy, stride):
    message, reached = one_save.run.with_name("message"), one_save.run.with_name("reached")
    refusals = 0

    def refuse() -> None:
        reached.touch()
        raise OSError(number, os.strerror(number), "a file")

    def attempt(operation: int) -> bool:
        nonlocal refusals
        one_save.reset()
        for path in (message, reached):
            path.unlink(missing_ok=True)
        assert one_save.in_child(operation, refuse, lambda: one_save.save_or_write(message)) == 0
        where = one_save.check()
        if message.exists():
            text = message.read_text(encoding="utf-8")
            assert "the checkpoint of step 2 cannot be saved" in text
            assert remedy in text
            assert ("previous checkpoint is as it was" in text) == (where == "before")
        else:
            assert where == "after"
        refusals += message.exists()
        return reached.exists()

    assert every_operation(attempt, stride) > 30
    assert refusals > 20 // stride


def test_a_disk_that_fills_up_within_a_file_is_told(one_save):
    """The system itself refuses to write further, below Python: files of at most so many bytes."""
    message = one_save.run.with_name("message")
    for name in ("published.safetensors", "optimizer.pt"):
        one_save.reset()
        limit = (one_save.run / "coat" / "state-000000001" / name).stat().st_size - 100

        def child(limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            one_save.save_or_write(message)

        message.unlink(missing_ok=True)
        assert wait(fork(child)) == 0
        assert "free some of this disk" in message.read_text(encoding="utf-8")
        assert one_save.check() == "before"


# -- random moments of whole runs ------------------------------------------------------------------------------------
def results(run: Path) -> dict[str, Any]:
    folder = newest_set(run)
    return {name: content(folder / name) for name in ("optimizer.pt", "lora.safetensors", "ema.safetensors")}


def test_runs_killed_at_random_moments_end_as_the_one_never_stopped(place, monkeypatch):
    whole = results(COATTrainer(job_of("whole", place, every=1000)).train().parent)
    run, rng = place["out"] / "killed", random.Random(0)
    kills = committed = told = 0
    open_one = trainer.Session

    def open_and_tell(*args: Any) -> Session:
        session = open_one(*args)
        os.write(told, b".")
        return session

    monkeypatch.setattr(trainer, "Session", open_and_tell)
    while kills < RANDOM_KILLS:
        reader, told = os.pipe()
        child = fork(COATTrainer(job_of("killed", place)).train)
        os.close(told)
        if rng.random() < 0.8:  # of the others the start is hit
            os.read(reader, 1)  # empty where the run had ended before it was killed: nothing is left to train then
        time.sleep(rng.uniform(0.0, 1.0))
        os.kill(child, signal.SIGKILL)
        code = wait(child)
        os.close(reader)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        newest = newest_set(run)
        step = int(newest.name.removeprefix("state-")) if newest else 0
        assert newest is None or damage(newest) is None
        assert step >= committed
        committed = step
        if code == 0:
            assert results(run) == whole
            committed = 0
            shutil.rmtree(run)
    monkeypatch.setattr(trainer, "Session", open_one)
    assert wait(fork(COATTrainer(job_of("killed", place)).train)) == 0
    assert results(run) == whole
