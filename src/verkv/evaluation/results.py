"""Results: one JSON line per answer, appended so that a killed run loses none and repeats none."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def answer_id(facts: dict) -> str:
    """16 hexadecimal digits that stand for everything that defines an answer.

    Parameters
    ----------
    facts : dict
        Plain JSON; the order of its keys does not matter.
    """
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ResultsFile:
    """A file of JSON lines that several processes may append to.

    Every line is written at once, under a lock, and forced to the disk. Before that, what a killed process left of its
    last line is cut off, and lines of others are read, so that an answer is there once however many processes run.

    Parameters
    ----------
    path : Path
        Made, with its folder, at the first :meth:`append`.

    Raises
    ------
    ValueError
        If the file holds a line that is no result, which is left as it is, or could not be written.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        folder = next(parent for parent in self.path.absolute().parents if parent.exists())
        is_usable = self.path.is_file() if self.path.exists() else folder.is_dir()
        if not is_usable or not os.access(self.path if self.path.exists() else folder, os.W_OK):
            raise ValueError(f"output={str(path)!r} cannot be written")
        self.ids: set[str] = set()
        self._n_read = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                self._read_new(file)

    def append(self, line: dict) -> bool:
        """Write a line unless its answer is there already; returns whether it was written."""
        text = json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file, _locked(file):
            self._read_new(file)
            if line["id"] in self.ids:
                return False
            file.truncate(self._n_read)  # behind the last line's end there can only be half a line
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.ids.add(line["id"])
        self._n_read += len(text)
        return True

    def _read_new(self, file: BinaryIO) -> None:
        """Take in complete lines from where the last reading ended."""
        file.seek(self._n_read)
        for text in file.read().splitlines(keepends=True):
            if not text.endswith(b"\n"):
                return self._check_rest(text)
            self.ids.add(_parsed(text, self.path)["id"])
            self._n_read += len(text)

    def _check_rest(self, text: bytes) -> None:
        """What is behind the last line will be cut off, so it must be the beginning of a line of ours."""
        start = b'{"id"'
        if not text.startswith(start[: len(text)]):
            raise ValueError(f"{str(self.path)!r} is no file of results; give another --output")


def read_results(path: Path) -> list[dict]:
    """All lines of a results file, without one that was cut off at the end.

    Raises
    ------
    ValueError
        If there is no such file, or it holds something else.
    """
    if not Path(path).is_file():
        raise ValueError(f"there are no results at {str(path)!r}")
    complete = [text for text in Path(path).read_bytes().splitlines(keepends=True) if text.endswith(b"\n")]
    return [_parsed(text, path) for text in complete]


def _parsed(text: bytes, path: Path) -> dict:
    with contextlib.suppress(ValueError):
        line = json.loads(text)
        if isinstance(line, dict) and "id" in line:
            return line
    raise ValueError(f"{str(path)!r} holds a line that is no result ({text[:40]!r}...); give another --output")


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold the file alone, among processes of one machine or a file system that knows POSIX locks."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
