"""Atomic publication of the files of a run, without stale files of older runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from massieu.checks import UserError
from massieu.outputs import folders
from massieu.outputs.folders import MANIFEST, check_digest, check_writable, publish, recover, replaced_report

OLD = {"report.html": "old page", "inspection.json": "old tables", "figures/layer_1.png": "old figure"}
NEW = {"report.html": "new page", "inspection.json": "new tables", "heads.csv": "new heads"}


def write(folder: Path, files: dict[str, str], kind: str = "inspection", about: str = "gpt2") -> None:
    with publish(folder, kind, about) as place:
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    names = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in names if path.name != MANIFEST}


def test_files_of_the_run_before_go_and_those_of_the_user_stay(tmp_path):
    write(tmp_path, OLD)
    write(tmp_path, {"comparison.html": "page"}, "comparison")
    (tmp_path / "figures" / "mine.png").write_text("mine")
    write(tmp_path, NEW)
    assert content(tmp_path) == {**NEW, "comparison.html": "page", "figures/mine.png": "mine"}
    write(tmp_path, OLD)
    (tmp_path / "inspection.json").write_text("changed by hand")
    (tmp_path / "figures" / "mine.png").unlink()
    write(tmp_path, {"report.html": "page"})
    assert content(tmp_path) == {
        **{"report.html": "page", "comparison.html": "page", "inspection.json": "changed by hand"}
    }
    assert not (tmp_path / "figures").exists()


KILLED = """
    import json, os, sys
    from pathlib import Path
    from massieu.outputs import folders

    folder, steps = Path(sys.argv[1]), {"done": 0}
    OLD, NEW = json.loads(sys.argv[2])

    def write(place, files):
        with folders.publish(place, "inspection", "gpt2") as staged:
            for name, text in files.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).write_text(text)

    def killed_at(step):
        replace = os.replace
        def fragile(source, target):
            if steps["done"] == step:
                os._exit(9)
            steps["done"] += 1
            replace(source, target)
        os.replace = fragile
        write(folder / str(step), NEW)
        os._exit(0)

    step, status = 0, None
    while status != 0:
        write(folder / str(step), OLD)
        child = os.fork()
        if not child:
            killed_at(step)
        status = os.waitpid(child, 0)[1]
        step += 1
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_step_leaves_the_whole_old_run_or_the_whole_new_one(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), json.dumps([OLD, NEW])]
    subprocess.run(command, check=True, timeout=120)
    seen = []
    for folder in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        check_digest(folder / "inspection.json")  # as a reader does
        seen.append(content(folder))
        assert seen[-1] in (OLD, NEW), folder
        assert [*folder.glob(".massieu-*")] == []
        assert check_digest(folder / "report.html").read_text()[:3] == seen[-1]["inspection.json"][:3]
    assert seen[0] == OLD
    assert seen[-1] == NEW
    assert len(seen) > len(NEW) + 2


def test_leftovers_of_a_killed_process_go_and_those_of_a_living_one_stay(tmp_path):
    for name in ("killed", "older", "unlocked"):
        (tmp_path / f".massieu-{name}" / "new").mkdir(parents=True)
    (tmp_path / ".massieu-killed" / "lock").touch()
    (tmp_path / ".massieu.mine").mkdir()
    day_before = time.time() - 2 * folders.ABANDONED
    os.utime(tmp_path / ".massieu-older", (day_before, day_before))
    with publish(tmp_path, "inspection") as place:
        (place / "report.html").write_text("page")
        assert {path.name for path in tmp_path.iterdir()} == {place.parent.name, ".massieu.mine"}
        check_writable(tmp_path)
        assert place.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", MANIFEST, ".massieu.mine"}


def test_a_folder_that_another_process_takes_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    make, made = folders.tempfile.mkdtemp, []

    def taken_at_once(**arguments):
        made.append(make(**arguments))
        if len(made) == 1:
            recover(tmp_path)  # as another process does
            assert not Path(made[0]).exists()
        return made[-1]

    monkeypatch.setattr(folders.tempfile, "mkdtemp", taken_at_once)
    write(tmp_path, NEW)
    assert len(made) == 2
    assert content(tmp_path) == NEW


def test_what_is_replaced_is_told(tmp_path):
    assert replaced_report(tmp_path / "report", "inspection") is None
    write(tmp_path / "report", OLD)
    moment = time.mktime((2026, 11, 17, 12, 0, 0, 0, 0, -1))
    os.utime(tmp_path / "report" / "report.html", (moment, moment))
    expected = f"replaces the report of 2026-11-17 on gpt2 in {tmp_path / 'report'}/"
    assert replaced_report(tmp_path / "report", "inspection") == expected
    assert replaced_report(tmp_path / "report", "comparison") is None
    (tmp_path / "report" / MANIFEST).unlink()  # as older versions wrote it
    assert replaced_report(tmp_path / "report", "inspection") == expected.replace(" on gpt2", "")


def test_a_file_that_its_run_has_not_written_is_refused(tmp_path):
    write(tmp_path, OLD)
    check_digest(tmp_path / "inspection.json")
    (tmp_path / "inspection.json").write_text("of another run")
    with pytest.raises(UserError, match="digest"):
        check_digest(tmp_path / "inspection.json")
    (tmp_path / MANIFEST).unlink()
    check_digest(tmp_path / "inspection.json")


@pytest.mark.parametrize("text", ['{"name": "an app"}', "[]", "{", '{"schema": "massieu.manifest/1", "runs": 7}'])
def test_a_manifest_of_another_program_is_not_replaced(text, tmp_path):
    (tmp_path / MANIFEST).write_text(text)
    for attempt in (lambda: write(tmp_path, NEW), lambda: check_writable(tmp_path)):
        with pytest.raises(UserError, match="no manifest"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
    assert (tmp_path / MANIFEST).read_text() == text
    assert check_digest(tmp_path / "inspection.json") == tmp_path / "inspection.json"


def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    write(tmp_path / "report", OLD)
    manifest = json.loads((tmp_path / "report" / MANIFEST).read_text())
    digest = folders._digest(tmp_path / "mine.txt")
    for name in ("../mine.txt", str(tmp_path / "mine.txt")):
        manifest["runs"]["inspection"]["files"] = {name: digest}
        (tmp_path / "report" / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="no manifest"):
            write(tmp_path / "report", NEW)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_folder_that_is_not_there_needs_no_settling(tmp_path):
    recover(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
