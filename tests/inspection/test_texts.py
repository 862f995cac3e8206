"""Documents from files; what cannot be read is one sentence."""

import io

import pytest

from massieu.inspection.texts import read_documents


def test_documents_lie_between_blank_lines(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("First,\r\nstill first.\r\n\r\n \r\nSecond é.\n".encode())
    assert read_documents([path]) == ["First,\nstill first.", "Second é."]


def test_jsonl_has_one_document_a_line(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('"one\u2028still one"\r\n\n{"text": "two\\n\\nstill two", "id": 3}\n', encoding="utf-8")
    assert read_documents([path, path]) == ["one\u2028still one", "two\n\nstill two"] * 2


def test_a_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\nb")))
    assert read_documents(["-"]) == ["a", "b"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    with pytest.raises(ValueError, match="- must be a text file in UTF-8"):
        read_documents(["-"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "must hold some text, and it is empty"),
        ("blank.txt", b" \n\n\t\n", "must hold some text, and it is empty"),
        ("binary.txt", b"\xff\xfe\x00\x80", "must be a text file in UTF-8"),
        ("bad.jsonl", b'"a"\n{', "line 2 is none"),
        ("other.jsonl", b'{"content": "a"}', 'a field "text", and line 1 does not'),
    ],
)
def test_a_file_without_text_is_refused_in_one_sentence(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_documents([path])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file or directory; check the path"):
        read_documents([tmp_path / "missing.txt"])
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_documents([tmp_path])


def test_the_field_of_a_line_has_a_name(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "Call me"}\n"Ishmael"\n')
    assert read_documents([file], column="body") == ["Call me", "Ishmael"]
    with pytest.raises(ValueError, match='a field "text", and line 1 does not; name the field with --column'):
        read_documents([file])
