"""Fetch KVPress' own tests and evaluation pipeline, so that VerKV's presses can be run through them.

They are in KVPress' source distribution but not in its wheel. Only ``tests/`` and ``evaluation/`` are unpacked, into
``.cache/kvpress-0.5.5/`` (ignored by git). KVPress' package itself is left out: a folder ``kvpress`` there would be
imported instead of the installed one.

    python scripts/fetch_kvpress_tests.py
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

VERSION = "0.5.5"
SHA256 = "0a5aa714c59c63a0f26588378e3bc9890a55f761a30efd1ad1b6623adb8b5296"
KEEP = ("tests", "evaluation")
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / f"kvpress-{VERSION}"


def fetch(folder: Path = FOLDER) -> Path:
    """Return `folder`, holding KVPress' ``tests/`` and ``evaluation/``; download them unless it does already."""
    stamp = folder / ".complete"
    if stamp.is_file() and stamp.read_text() == SHA256:
        return folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked = Path(scratch, "unpacked")
        unpack(download(Path(scratch)), unpacked)
        (unpacked / stamp.name).write_text(SHA256)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unpacked, folder)
    return folder


def download(into: Path) -> Path:
    """Download the source distribution with pip and check its hash."""
    # pip runs a source distribution's build backend even to download it, so pip has to check the hash first.
    requirements = into / "requirements.txt"
    requirements.write_text(f"kvpress=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=kvpress", "--require-hashes"]
    command += ["--dest", str(into), "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"pip could not download the source of kvpress {VERSION}:\n{result.stderr.strip()}")
    (archive,) = into.glob("kvpress-*.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{archive.name} has sha256 {digest}, expected {SHA256}")
    return archive


def unpack(archive: Path, into: Path) -> None:
    """Unpack the regular files of the folders in KEEP."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _root, *parts = PurePosixPath(member.name).parts
            if member.isfile() and parts and parts[0] in KEEP and ".." not in parts:
                target = into.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(tar.extractfile(member).read())


if __name__ == "__main__":
    try:
        print(f"KVPress' tests are in {fetch()}")
    except RuntimeError as error:
        sys.exit(f"fetch_kvpress_tests: {error}")
