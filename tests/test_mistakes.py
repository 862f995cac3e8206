"""Mistakes of users end with one sentence and exit code 2; each once showed a traceback or was called a defect."""

import json
import os
import shutil

import pytest

pytest.importorskip("transformers")
from massieu import assets, cli

FAST = ["--heads-only", "--limit", "2"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders and files with one thing wrong in each."""
    root = tmp_path_factory.mktemp("places")
    model = shutil.copytree(assets.MODEL, root / "headless")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "n_head": 0}))
    deep = shutil.copytree(assets.MODEL, root / "deep")
    (deep / "config.json").write_text("[" * 100_000)
    (root / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (root / "step.jsonl").write_text('{"step": 1e999, "places": []}\n')
    assert cli.main(["inspect", "-q", *FAST, "--out", str(root / "whole")]) == 0
    whole = json.loads((root / "whole" / "inspection.json").read_text())
    without_model = {name: fact for name, fact in whole["facts"].items() if name != "model"}
    for name, gone in (("facts", {"facts": None}), ("model", {"facts": without_model}), ("heads", {"heads": None})):
        (root / f"no-{name}").mkdir()
        (root / f"no-{name}" / "inspection.json").write_text(json.dumps({**whole, **gone}))
    (root / "nested").mkdir()
    (root / "nested" / "inspection.json").write_text("[" * 100_000)
    (root / "loop").symlink_to("loop")
    return root


NOBODY = "names the home folder of a user who does not exist; check the name after ~"
LONG = "a" * 300


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["inspect", "~nosuchuser/model", *FAST], NOBODY),
        (["inspect", "--text", "~nosuchuser/text.txt"], NOBODY),
        (["inspect", "--out", "~nosuchuser/report", *FAST], NOBODY),
        (["compare", "~nosuchuser/a", "~nosuchuser/b"], NOBODY),
        (["inspect", LONG, *FAST], "MODEL must be a folder that can be read, got aaa"),
        (["inspect", "--text", LONG], "aaa cannot be read: "),
        (["inspect", "--out", "{root}/" + LONG, *FAST], "aaa cannot be read or written: File name too long"),
        (["compare", LONG, "b"], "aaa cannot be read or written: File name too long"),
        (["watch", f"{LONG}.csv"], "aaa.csv"),
        (["learn", "linear", "--out", "{root}/" + LONG], "cannot be read or written: File name too long"),
        (["inspect", "--device", "meta", *FAST], "device meta holds no numbers, so nothing could be measured"),
        (["inspect", "{root}/headless", *FAST], "headless cannot be loaded (ZeroDivisionError"),
        (["doctor", "{root}/headless"], "headless cannot be loaded (ZeroDivisionError"),
        (["inspect", "{root}/deep", *FAST], "config.json of {root}/deep must be JSON, and it is not"),
        (["inspect", "--text", "{root}/deep.jsonl", "--strict"], "must hold one JSON value a line, and line 1 is none"),
        (["compare", "{root}/nested", "{root}/nested"], "must be JSON as massieu inspect writes it, and it is not"),
        (["compare", "{root}/no-facts", "{root}/no-facts"], "and facts is missing or not as expected"),
        (["compare", "{root}/no-model", "{root}/no-model"], "and facts.model is missing or not as expected"),
        (["compare", "{root}/no-heads", "{root}/no-heads"], "and heads is missing or not as expected"),
        (["verify", "--list", "--out", "{root}/verdicts"], "--list runs nothing, so nothing can be written to"),
        (["merge", "{root}/whole", "{root}/no-heads", "--out", "{root}/loop"], "loop cannot be written to: "),
        (
            ["inspect", "--out", "{root}/report", "--checkpoint", "{root}/report/", *FAST],
            "--checkpoint must be a file, got the folder of --out; leave it out",
        ),
        (["watch", "--", "a.csv", "--once"], "unrecognized arguments: --once; see massieu watch --help"),
        (["learn", "linear", "--target", ""], "argument --target: expected a number, got an empty text"),
        (["learn", "linear", "--noise", "1e300"], "noise must have at most the variance of the signal, 5, got"),
        (["watch", "{root}/step.jsonl", "--once"], "step.jsonl holds no reading in its 1 line"),
        (["watch", "{root}/deep.jsonl", "--once"], "deep.jsonl holds no reading in its 1 line"),
        (["inspect", "a\0b", *FAST], r"expected a path or a name, got a\x00b with a NUL character"),
        (["inspect", "--out", "a\udcff", *FAST], r"expected a path or a name in UTF-8, got a\udcff"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_defect(arguments, sentence, places, capsys):
    given = [each.replace("{root}", str(places)) for each in arguments]
    before = sorted(places.rglob("*"))
    assert sentence.replace("{root}", str(places)) in refused(given, capsys)
    assert sorted(places.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs the permissions of POSIX")
@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_a_folder_that_may_not_be_read_is_one_sentence(command, tmp_path, capsys):
    import massieu.inspection.observable_calls  # noqa: F401  # while everything may be read

    closed, user = tmp_path / "closed", os.geteuid()
    closed.mkdir(mode=0)
    os.seteuid(65534 if user == 0 else user)  # root may read everything
    try:
        assert f"MODEL must be a folder that can be read, got {closed}"[:80] in refused([command, str(closed)], capsys)
    finally:
        os.seteuid(user)


def refused(arguments, capsys):
    """Return the one line, besides progress, that rejects the arguments."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code == cli.USAGE, err
    (line,) = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert out == ""
    return line


def test_a_path_below_the_home_folder_needs_no_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["inspect", "-q", "--out=~/report", *FAST]) == 0
    assert (tmp_path / "report" / "report.html").exists()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~draft.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely.")
    assert cli.main(["inspect", "-q", "--heads-only", "--text", "~draft.txt"]) == 0
