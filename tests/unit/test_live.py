"""The live page's server: who may read, who may ask; and the files by which a run is asked."""

import http.client
import itertools
import json
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image
from werkzeug.test import Client, create_environ, run_wsgi_app

from coat_flux.base.errors import UserError
from coat_flux.cli.runs import serve
from coat_flux.pages.live import Watch
from coat_flux.pages.report import write_report
from coat_flux.watch.live import COMMANDS, LiveRun, give_command, read_status
from tests.unit.test_run_report import make_run

PICTURE = "1700000000000__000000002_0.png"
LINKED = "1700000000000__000000009_0.png"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a sample, and things beside it that nobody may read."""
    folder = tmp_path / "run"
    config = make_run(folder, [1 / step for step in range(1, 11)]) / "config.yaml"
    config.write_text(config.read_text().replace("train:", "validation: {hold_out: 2}\n    train:"))
    (folder / "samples").mkdir()
    (folder / "coat" / "validation.csv").write_text("step,loss\n0,3.0\n4,1.0\n8,2.0\n", encoding="utf-8")
    (folder / "coat" / "log.txt").write_text("<script>alert(1)</script>\nlast line\n", encoding="utf-8")
    Image.new("RGB", (8, 8), "red").save(folder / "samples" / PICTURE)
    (tmp_path / PICTURE).write_text("secret", encoding="utf-8")
    (folder / "samples" / LINKED).symlink_to(tmp_path / PICTURE)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def live(run: Path, *, samples: bool = True) -> LiveRun:
    return LiveRun(run, 0, 100, samples=samples)


def page_of(run: Path) -> str:
    return Client(Watch(run)).get("/").text


def enabled(page: str) -> list[str]:
    """The buttons that can be pressed."""
    buttons = re.findall(r'<button type="button" name="(\w+)" title="[^"]*"( disabled)?>', page)
    assert [name for name, _ in buttons] == list(COMMANDS)
    return [name for name, disabled in buttons if not disabled]


@pytest.mark.parametrize("headers", [{}, {"X-Coat-Token": "é"}, {"Authorization": "{token}"}])
def test_without_the_token_nothing_changes(run, headers):
    watch = Watch(run)
    client = Client(watch)
    with live(run) as asked:
        before = contents(run)
        for name in COMMANDS:
            sent = {key: value.format(token=watch.token) for key, value in headers.items()}
            for path in (f"/commands/{name}", f"/commands/{name}?token={watch.token}"):
                assert client.post(path, headers=sent, data={"token": watch.token}).status_code == 403
            assert client.get(f"/commands/{name}", headers={"X-Coat-Token": watch.token}).status_code == 404
        for path in ("/", f"/samples/{PICTURE}"):
            assert client.get(path).status_code == 200
        assert contents(run) == before
        assert asked.poll() == frozenset()


def test_with_the_token_a_run_that_goes_on_is_asked_once(run):
    watch = Watch(run)
    client, token = Client(watch), {"X-Coat-Token": watch.token}
    assert client.post("/commands/stop", headers=token).status_code == 409  # nothing runs
    with live(run) as asked:
        for name in ("stop", "sample", "stop"):
            assert client.post(f"/commands/{name}", headers=token).status_code == 202
        assert client.post("/commands/delete", headers=token).status_code == 404
        assert asked.poll() == {"stop", "sample"}
        assert asked.poll() == frozenset()
        give_command(run, "save")
    assert read_status(run)["ended"] == "finished"
    assert client.post("/commands/save", headers=token).status_code == 409
    with live(run) as again:  # what was asked of the run before is forgotten
        assert again.poll() == frozenset()
    with live(run, samples=False):
        assert client.post("/commands/sample", headers=token).status_code == 409
        assert enabled(page_of(run)) == ["save", "stop"]


@pytest.mark.parametrize(
    ("hosts", "bound", "status"),
    [
        (["localhost:1", "[::1]:8675"], "127.0.0.1", 200),
        (["127.0.0.1.evil.example", "192.168.1.7:8675", "[bad", ""], "127.0.0.1", 403),
        (["192.168.1.7:8675", "localhost", socket.gethostname()], "0.0.0.0", 200),
        (["evil.example"], "0.0.0.0", 403),
    ],
)
def test_other_names_than_this_machines_are_refused(hosts, bound, status, run):
    for host, path in itertools.product(hosts, ("/", f"/samples/{PICTURE}")):
        environ = create_environ(path) | {"HTTP_HOST": host}  # not by `Client`: an old one fails on such names itself
        assert run_wsgi_app(Watch(run, bound), environ)[1].startswith(str(status))


@pytest.mark.parametrize("name", ["../../" + PICTURE, "..%2f..%2f" + PICTURE, LINKED, "a.yaml"])
def test_only_samples_are_served(name, run):
    answer = Client(Watch(run)).get(f"/samples/{name}")
    assert answer.status_code == 404
    assert b"secret" not in answer.data


def test_no_origin_but_ours_may_read_or_frame_it(run):
    answer = Client(Watch(run)).get("/", headers={"Origin": "https://evil.example"})
    assert not [name for name, _ in answer.headers if name.lower().startswith("access-control")]
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    nonce = re.search(r"'nonce-([^']+)'", policy)[1]
    assert re.findall("<script[^>]*>", answer.text) == [f'<script nonce="{nonce}">']
    assert Client(Watch(run)).get("/").headers["Content-Security-Policy"] != policy  # a nonce of its own
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_it_listens_on_the_loopback_address_only(run, capsys):
    serve(run, None, 0)  # as `coat-flux watch` and `train --watch` do
    address = urlsplit(capsys.readouterr().out.removeprefix("watch: ").strip())
    assert (address.hostname, len(address.fragment)) == ("127.0.0.1", 32)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=10)
    connection.request("GET", "/")
    assert b"step 10 of 10" in connection.getresponse().read()
    connection.close()
    if sys.platform == "linux":
        with socket.socket() as elsewhere:  # were it bound to all addresses, this one would be taken
            elsewhere.bind(("127.0.0.2", address.port))
    with pytest.raises(UserError, match="--port"):
        Watch(run).start(address.port)
    assert urlsplit(Watch(run).start()).port != address.port
    assert Watch(run).is_private
    assert not Watch(run, "0.0.0.0").is_private


def test_the_page_shows_the_run_and_escapes_its_texts(run):
    assert "not written anything yet" in page_of(run / "none")
    with live(run):
        page = page_of(run)
    assert enabled(page) == list(COMMANDS)
    assert "<title>10 % shirt &lt;b&gt;</title>" in page
    for part in ("step 10 of 100, 0.25 s per step, 0:00:22 left", "lowest: step 4", "a sks &lt;i&gt;", "last line"):
        assert part in page, part
    assert f'src="samples/{PICTURE}"' in page  # and not the newer one, a link
    assert "<script>" not in page
    assert "<b>" not in page


def test_the_phase_that_is_open_is_named(run):
    for phase, words in {"sample": "Sampling", "step": "Training", "load": "Loading", None: "Training"}.items():
        phases = {name: {"open": name == phase} for name in ("load", "step", "sample")}
        (run / "coat" / "memory.json").write_text(json.dumps({"phases": phases}), encoding="utf-8")
        with live(run):
            assert re.search(f"{words}[a-z ]*: step 10 of 100", page_of(run)), phase


@pytest.mark.parametrize(
    ("ends", "sentence"), [(None, "Finished"), (KeyboardInterrupt(), "Stopped after"), (OSError("no room"), "no room")]
)
def test_how_it_ended_is_said(run, ends, sentence):
    with suppress(KeyboardInterrupt, OSError), live(run):
        if ends is not None:
            raise ends
    page = page_of(run)
    assert sentence in page
    assert sentence in write_report(run).read_text(encoding="utf-8")
    assert enabled(page) == []


def test_a_killed_run_and_one_whose_number_another_process_has_are_gone(run):
    live(run).__enter__()
    assert read_status(run)["alive"]
    path = run / "coat" / "status.json"
    status = json.loads(path.read_text(encoding="utf-8"))
    for change in ({"created": status["created"] - 100}, {"pid": 2**22 + 1}):
        path.write_text(json.dumps(status | change), encoding="utf-8")
        assert "without a message" in page_of(run)
    path.write_text(json.dumps(status | {"machine": "another"}), encoding="utf-8")
    assert read_status(run)["alive"]
    for file in (run / "coat").iterdir():
        os.utime(file, (0, 0))
    assert not read_status(run)["alive"]
    path.write_text("{", encoding="utf-8")
    assert "does not say whether it is still going" in page_of(run)
