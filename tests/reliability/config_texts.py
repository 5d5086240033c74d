"""Malformed config files that are no changed job: other formats, broken YAML and JSON."""

from __future__ import annotations

from collections.abc import Iterator

from tests.reliability.bad_config import BadConfig

FRAME = "job: extension\nconfig:\n  name: run\n  process:\n    - type: coat_flux_trainer\n"


def texts() -> Iterator[BadConfig]:
    def case(name: str, text: str | bytes, *words: str, suffix: str = ".yaml") -> BadConfig:
        return BadConfig(name, words, text=text, suffix=suffix)

    yield case("empty", "", "job and config")
    yield case("only a comment", "# nothing\n", "job and config")
    yield case("a list", "- a\n- b\n", "job and config")
    yield case("a text", "train my shirt\n", "job and config")
    yield case("binary", bytes(range(256)), "not UTF-8")
    yield case("UTF-16", FRAME.encode("utf-16"), "not UTF-8")
    yield case("NUL", FRAME + "      a: \0\n", "line 6", "U+0000")
    yield case("tabs", FRAME + "\ttrain: 1\n", "line 6", "spaces, not tabs")
    yield case("colon", FRAME + "      trigger_word: a: b\n", "line 6", "in quotes")
    yield case("open bracket", FRAME + "      resolution: [512, 768\n", "not YAML")
    yield case("open quote", FRAME + "      trigger_word: 'coat\n", "not YAML")
    yield case("bad indentation", FRAME + "     train:\n        steps: 1\n", "not YAML")
    yield case("key twice", FRAME + "      train: {lr: 1, steps: 2, lr: 3}\n", "train.lr", "written twice")
    yield case("no job", "config: {name: a, process: [{}]}\n", "job", "is missing")
    yield case("no config", "job: extension\n", "config", "must be a block")
    yield case(
        "no name", "job: extension\nconfig: {process: [{type: coat_flux_trainer}]}\n", "config.name", "must be a string"
    )
    yield case("name is a number", "job: extension\nconfig: {name: 5, process: [{}]}\n", "config.name=5", "in quotes")
    yield case("no process", "job: extension\nconfig: {name: a}\n", "config.process", "must be a list")
    yield case(
        "process is a block",
        "job: extension\nconfig: {name: a, process: {type: b}}\n",
        "config.process",
        "must be a list",
    )
    yield case(
        "process is text", "job: extension\nconfig: {name: a, process: [b]}\n", "config.process[0]", "must be a block"
    )
    yield case("two documents", FRAME + "---\n" + FRAME, "another document")
    yield case("code", FRAME + "      a: !!python/object/apply:os.system ['true']\n", "line 6", "plain values only")
    yield case("an object", FRAME + "      a: !!python/object:pathlib.Path {}\n", "line 6", "plain values only")
    yield case("a name", FRAME + "      a: !!python/name:os.system\n", "line 6", "plain values only")
    yield case("own tag", FRAME + "      a: !mine 1\n", "line 6", "plain values only")
    yield case("a date", FRAME + "      training_seed: 2024-01-31\n", "training_seed", "date", "in quotes")
    yield case("no date", FRAME + "      training_seed: 2024-13-45\n", "month", "in quotes")
    yield case("binary value", FRAME + "      a: !!binary aGVsbG8=\n", "config.process[0].a", "bytes")
    yield case("a set", FRAME + "      a: !!set {b}\n", "config.process[0].a", "set")
    yield case("list as key", FRAME + "      ? [1, 2]\n      : 3\n", "line 6", "a key must be a string")
    yield case("block as key", FRAME + "      ? {a: 1}\n      : 3\n", "line 6", "a key must be a string")
    yield case("alias of itself", FRAME + "      a: &x [*x]\n", "alias that contains itself")
    yield case("alias of nothing", FRAME + "      a: *nothing\n", "undefined alias")
    yield case("unset variable", FRAME + "      training_folder: ${COAT_FLUX_UNSET_VARIABLE}\n", "line 6", "not set")
    yield case("empty JSON", "", "not JSON", suffix=".json")
    yield case("JSON comma", '{"job": "extension",\n}', "line 2", "not JSON", suffix=".json")
    yield case("JSON twice", '{"job": {"a": 1, "a": 2}}', "'a' is written twice", suffix=".json")
    yield case("JSON deep", "[" * 90_000, "nested too deeply", suffix=".json")
    yield case("JSON digits", '{"job": ' + "9" * 5000 + "}", "not JSON", suffix=".json")
    yield case(
        "sexagesimal",
        FRAME + "      train: {steps: 1:30}\n",
        "line 6",
        "train.steps",
        "base 60, 90",
        "'1:30' in quotes",
    )
    yield case("octal", FRAME + "      training_seed: 010\n", "line 6", "training_seed", "octal number, 8", "write 10")
    yield case(
        "hard space before a key", FRAME + "      train:\n      \u00a0 steps: 5\n", "U+00A0", "type the key again"
    )
    yield case("wide colon", FRAME + "      trigger_word：ohwx\n", "line 6", "U+FF1A", "plain colon")
    yield case("escapes", FRAME + '      training_folder: "C:\\Users\\me"\n', "line 6", "use single quotes")
    yield case("no suffix", FRAME, "ends in .yaml", suffix="")
    yield case("a photo", FRAME, "ends in .yaml", suffix=".jpg")
