"""The attack on the commands finds planted defects."""

import pytest

pytest.importorskip("transformers")
from attack import invocations
from massieu.commands import doctor


def test_invocations_that_end_with_a_sentence_hold():
    assert list(invocations.attack(0, 4)) == [None] * 4


def defect(options):
    raise ValueError("Overflow when unpacking long long")


def clear(options):
    print("\x1b[2J")
    return 0


def litter(options):
    with open("litter.txt", "w") as file:
        file.write("half of it")
    return 3


@pytest.mark.parametrize(
    ("run", "wrong"),
    [(defect, "exit code 70"), (clear, "control characters"), (litter, "these files are new, changed or gone")],
)
def test_a_command_with_a_defect_is_found(run, wrong, tmp_path, monkeypatch):
    (tmp_path / "file.txt").write_text("of a user")
    monkeypatch.chdir(tmp_path)
    assert invocations._wrong(["doctor"], None) is None  # the control
    monkeypatch.setattr(doctor, "run", run)
    assert wrong in invocations._wrong(["doctor"], None)
