"""What goes into the corpus and what is held out."""

import zipfile
from pathlib import Path

import pytest

from examples.train_north_nano import corpus
from examples.train_north_nano.corpus import Document, is_held_out, is_source, without_copies
from north_jax.quality.held_out import held_out_texts


def lines(first: int, count: int) -> str:
    return "".join(f"value_{n} = {n}\n" for n in range(first, first + count))


def test_held_out_files_are_those_that_the_rule_names() -> None:
    files = held_out_texts()
    assert len(files) > 40
    assert all(is_held_out(path) and is_source(text.encode()) for path, text in files)
    assert 0.03 < sum(is_held_out(f"module_{n}.py") for n in range(20000)) / 20000 < 0.05


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"import os\n" * 40, True),
        (b"import os\n", False),
        (b"import os\n" * 40_000, False),
        (b"# \xff\n" * 100, False),
        (b"T = [" + b"0x3f, 0x40,\n" * 100 + b"]\n", False),
        (b"x = '" + b"a b" * 500 + b"'\n" * 40, False),
    ],
)
def test_tables_and_binary_files_are_left_out(data: bytes, kept: bool) -> None:
    assert is_source(data) == kept


def test_copies_of_held_out_text_are_dropped() -> None:
    held_out = [Document("a", "held.py", lines(0, 40))]
    copied = Document("b", "copied.py", lines(500, 60) + lines(10, corpus.WINDOW).replace("value", "\tvalue"))
    similar = Document("b", "similar.py", lines(700, 60) + lines(10, corpus.WINDOW - 1))
    assert list(without_copies([copied, similar], held_out)) == [similar]


def test_repeated_files_are_dropped() -> None:
    first, short = Document("a", "first.py", lines(0, 200)), Document("a", "short.py", lines(0, 5))
    again = Document("b", "again.py", lines(0, 190) + lines(300, 10))
    other = Document("b", "other.py", lines(150, 200))
    assert list(without_copies([first, short, again, other, short], [])) == [first, short, other]


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ("License-Expression: MIT\n", "MIT"),
        ("Classifier: License :: OSI Approved :: Apache Software License\n", "Apache Software License"),
        ("License: GPL-3.0-only\n", None),
        ("", None),
    ],
)
def test_only_permissive_licences_pass(tmp_path: Path, fields: str, licence: str | None) -> None:
    with zipfile.ZipFile(tmp_path / "thing-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("thing-1.0.dist-info/METADATA", f"Name: thing\nVersion: 1.0\n{fields}")
        if licence is None:
            with pytest.raises(ValueError, match=r"thing-1\.0.*permissive"):
                corpus.wheel_licence(archive)
        else:
            assert corpus.wheel_licence(archive) == licence


def test_documents_survive_the_file(tmp_path: Path) -> None:
    documents = [Document("a", "x.py", "é\n\u2028\r\n"), Document("b", "y.py", "")]
    corpus.write_documents(tmp_path / "x.xz", documents, preset=0)
    assert list(corpus.read_documents(tmp_path / "x.xz")) == documents
