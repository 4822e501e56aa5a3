"""Lines of a YAML file, and its syntax errors."""

from pathlib import Path

import pytest

from serve_app.settings.checking import Document, UnreadableError


def document(folder: Path, text: str) -> Document:
    path = folder / "config.yaml"
    path.write_text(text)
    return Document(path)


def rejection(folder: Path, text: str) -> tuple[str, int | None]:
    with pytest.raises(UnreadableError) as caught:
        document(folder, text)
    return caught.value.mistake.message, caught.value.mistake.line


def test_a_sentence_is_placed_at_the_key_with_which_it_begins(tmp_path: Path) -> None:
    found = document(tmp_path, "a:\n  b:\n    - c: 1\n    - d: 2\n      e: 3\n")
    assert found.mistake(("a",), "b[1].e must be positive, got 3").line == 5
    assert found.mistake(("a",), "b[1].f is missing").line == 4
    assert found.mistake(("a",), "two names are the same").line == 1


def test_keys_of_a_merged_block_have_the_line_of_that_block(tmp_path: Path) -> None:
    text = "base: &base\n  port: 1\nother:\n  <<: *base\n  host: x\n"
    found = document(tmp_path, text)
    assert found.line(("other", "port")) == 2
    assert found.line(("other", "host")) == 5
    assert found.mistakes == []


def test_a_repeated_key_is_a_mistake(tmp_path: Path) -> None:
    (mistake,) = document(tmp_path, "a:\n  port: 1\n  host: x\n  port: 2\n").mistakes
    assert (mistake.line, mistake.message) == (
        4,
        "port is duplicated in this block, first in line 2: remove one",
    )


def test_a_slip_in_the_yaml_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    assert rejection(tmp_path, "a:\n  b: 1\n\tc: 2\n") == (
        "is not valid YAML: found character '\\t' that cannot start any token: indent with spaces",
        3,
    )
    message, line = rejection(tmp_path, "a: 1\n  b: 2\n")
    assert line == 2
    assert message.startswith("is not valid YAML: mapping values are not allowed here: check the indentation")
    assert rejection(tmp_path, "a: [1, 2\n")[1] is not None


def test_a_missing_file_names_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "local.yaml").write_text("")
    with pytest.raises(UnreadableError, match=r"file not found: .* has local\.yaml"):
        Document(tmp_path / "locla.yaml")


def test_a_file_that_is_no_text_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableError, match="cannot be read"):
        Document(path)
