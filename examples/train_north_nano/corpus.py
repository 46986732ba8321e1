"""Gather the training text of North Nano: permissively licensed Python source, with a held-out part of the stdlib.

    python -m examples.train_north_nano.corpus --out .nano --python python3.13 --python python3.12

reads the standard library of the interpreters named (the first one also gives the held-out files), downloads the
wheels pinned in packages.txt, and writes `corpus.jsonl.xz` (one JSON object a line: source, path, text) and
`heldout.jsonl.xz`, with counts and licences in `corpus.json`. Nothing that is read gets executed.
"""

import argparse
import hashlib
import json
import lzma
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from email.parser import Parser
from pathlib import Path

from north_jax.quality.held_out import HELD_OUT

HERE = Path(__file__).parent
PACKAGES = HERE / "packages.txt"
HELD_OUT_FRACTION = 0.04
SIZE_LIMITS = 256, 300_000  # bytes; larger files are mostly generated tables
WINDOW = 12  # consecutive non-blank lines that count as copied text
# Generated tables, deliberately broken sources and test inputs: not Python that anyone writes.
STDLIB_SKIPPED = ("site-packages", "pydoc_data", "lib2to3/tests/data", "test/data", "test/tokenizedata", "encodings/")
LICENCES = ("MIT", "BSD", "APACHE", "PSF", "PYTHON SOFTWARE FOUNDATION", "ISC", "UNLICENSE", "PUBLIC DOMAIN", "HPND")


@dataclass(frozen=True)
class Document:
    """One source file. `source` is what it came from ("cpython-3.13.0", "numpy-2.4.0"), `path` its place there."""

    source: str
    path: str
    text: str


def is_held_out(path: str) -> bool:
    """Whether a standard-library path belongs to the held-out part, by its name alone, so in every version."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4]) / 2**32 < HELD_OUT_FRACTION


def is_source(data: bytes) -> bool:
    """Whether a file is text that someone wrote: UTF-8, of ordinary size and line length, not a table of numbers."""
    if not SIZE_LIMITS[0] <= len(data) <= SIZE_LIMITS[1]:
        return False
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    lines = text.splitlines()
    letters = sum(map(str.isalpha, text)) + text.count(" ") + text.count("\n")
    return len(text) < 80 * len(lines) and max(map(len, lines)) < 1000 and letters > 0.6 * len(text)


def stdlib_documents(python: str) -> Iterator[Document]:
    """The standard library of an interpreter, its tests included."""
    command = "import platform, sysconfig; print(platform.python_version(), sysconfig.get_path('stdlib'))"
    version, folder = subprocess.run(
        [python, "-Ic", command], check=True, capture_output=True, text=True
    ).stdout.split()
    for file in sorted(Path(folder).rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        data = file.read_bytes()
        if not path.startswith(STDLIB_SKIPPED) and "/bad" not in path and is_source(data):
            yield Document(f"cpython-{version}", path, data.decode())


def wheel_licence(archive: zipfile.ZipFile) -> str:
    """The licence that a wheel's metadata declares; ValueError if it is not one of the permissive ones."""
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(archive.read(metadata).decode())
    classifiers = [c.rsplit(" :: ", 1)[-1] for c in fields.get_all("Classifier", []) if c.startswith("License ::")]
    text = fields.get("License-Expression") or "; ".join(classifiers) or (fields.get("License") or "").split("\n")[0]
    upper = text.upper()
    if "GPL" in upper or not any(name in upper for name in LICENCES):
        raise ValueError(f"{Path(archive.filename or '').name}: licence {text!r} is not one of the permissive ones")
    return text


def wheel_documents(archive: zipfile.ZipFile) -> Iterator[Document]:
    """The Python files of a wheel, without those it vendors from elsewhere."""
    name, version = Path(archive.filename or "").name.split("-")[:2]
    for path in sorted(archive.namelist()):
        vendored = any(part in path for part in ("_vendor", "/vendor", "/extern/", "/externals/", "_pb2"))
        if path.endswith(".py") and not vendored:
            data = archive.read(path)
            if is_source(data):
                yield Document(f"{name.lower()}-{version}", path, data.decode())


def windows(text: str) -> Iterator[bytes]:
    """A hash of every run of WINDOW consecutive non-blank lines, indentation ignored."""
    lines = [line for raw in text.splitlines() if len(line := raw.strip()) > 2]
    for i in range(len(lines) - WINDOW + 1):
        yield hashlib.blake2b("\n".join(lines[i : i + WINDOW]).encode(), digest_size=8).digest()


def without_copies(documents: Iterable[Document], held_out: list[Document]) -> Iterator[Document]:
    """Drop what shares a window with a held-out file, and what mostly repeats files that came before."""
    forbidden = {w for document in held_out for w in windows(document.text)}
    seen: set[bytes] = set()
    for document in documents:
        hashes = list(windows(document.text))
        if not forbidden.isdisjoint(hashes):
            continue
        # A quarter of the hashes, chosen by value, represents the file; a file shorter than a window stands for itself.
        whole = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
        sample = {h for h in hashes if h[0] < 64} or {whole}
        if len(sample & seen) <= len(sample) // 2:
            seen |= sample
            yield document


def write_documents(path: Path, documents: Iterable[Document], preset: int) -> None:
    """Write documents as JSON lines, compressed by xz with the given preset (0 to 9)."""
    with lzma.open(path, "wt", encoding="utf-8", preset=preset) as file:
        for document in documents:
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def read_documents(path: Path) -> Iterator[Document]:
    """Read what `write_documents` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield Document(**json.loads(line))


def download(wheels: Path) -> None:
    """Fetch the wheels that packages.txt pins."""
    wheels.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(wheels), "--requirement", str(PACKAGES)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)


def gather(pythons: list[str], wheels: Path) -> tuple[list[Document], list[Document], dict[str, str]]:
    """(training documents, held-out documents, licence of every source) from interpreters and a folder of wheels."""
    stdlib = [list(stdlib_documents(python)) for python in pythons]
    held_out = [document for document in stdlib[0] if is_held_out(document.path)]
    candidates: list[Document] = []
    licences: dict[str, str] = {}
    paths: set[str] = set()
    for version in stdlib:
        new = [d for d in version if d.path not in paths and not is_held_out(d.path)]
        candidates += new
        paths |= {d.path for d in new}
        licences[version[0].source] = "PSF-2.0"
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            licences["-".join(wheel.name.lower().split("-")[:2])] = wheel_licence(archive)
            candidates += wheel_documents(archive)
    shipped = list(read_documents(HELD_OUT))  # of the interpreter that the shipped model was measured with
    return list(without_copies(candidates, [*held_out, *shipped])), held_out, licences


def report(training: list[Document], held_out: list[Document], licences: dict[str, str]) -> dict[str, object]:
    """Counts, bytes and licences, as the model card cites them."""

    def size(documents: list[Document]) -> dict[str, int]:
        return {"files": len(documents), "bytes": sum(len(d.text.encode()) for d in documents)}

    by_source: dict[str, list[Document]] = {source: [] for source in licences}
    for document in training:
        by_source[document.source].append(document)
    sources = {source: {"licence": licences[source], **size(documents)} for source, documents in by_source.items()}
    return {"training": size(training), "held_out": size(held_out), "sources": sources}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus and the downloaded wheels")
    parser.add_argument("--python", action="append", help="interpreter whose standard library is read (repeatable)")
    arguments = parser.parse_args()
    download(arguments.out / "wheels")
    training, held_out, licences = gather(arguments.python or [sys.executable], arguments.out / "wheels")
    write_documents(arguments.out / "corpus.jsonl.xz", training, preset=4)
    write_documents(arguments.out / "heldout.jsonl.xz", held_out, preset=9)
    counts = report(training, held_out, licences)
    (arguments.out / "corpus.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(f"training {counts['training']}, held out {counts['held_out']}")


if __name__ == "__main__":
    main()
