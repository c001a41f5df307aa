"""The emulator itself: it sees a missing barrier and what sanitizers see, and it runs the file that is shipped."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from agreement import needs_compiler
from barriers import barriers_of, check_barriers, make_recording
from emulator import compile_emulator
from replay import replay

from verkv.cuda import layout

pytestmark = needs_compiler

HERE = Path(__file__).parent


def test_parameter_block_is_that_of_the_kernels():
    """Names and order; that sizes are the same is asserted whenever a library is loaded."""
    body = re.search(r"struct Params \{(.*?)\n\};", layout.SOURCE.read_text(), re.S)[1]
    body = re.sub(r"//[^\n]*", "", body)
    names = [name for line in body.split(";") for name in re.findall(r"(\w+)\s*(?=,|$)", line.strip())]
    assert names == [name for name, _ in layout.Params._fields_]


def test_constants_are_those_of_the_kernels():
    source = layout.SOURCE.read_text()
    for name, value in {
        "NT": layout.N_THREADS,
        "CHUNK": layout.CHUNK,
        "SELECTED": layout.MAX_SHORTLIST,
        "SKETCH_GROUP": layout.SKETCH_GROUP,
    }.items():
        assert int(re.search(rf"#define {name}\s+(\d+)", source)[1]) == value
    assert "#include" not in source


def test_removed_barriers_are_caught():
    """One or two of several kernels; ``python tests/cuda/barriers.py`` tries all."""
    lines = [barriers_of("order_keys")[0], *barriers_of("vk_score")[:1], *barriers_of("vk_attend")[:2]]
    found = check_barriers([*lines, barriers_of("vk_emit")[0]])
    assert all(found.values()), found


def test_sanitizers_find_nothing(tmp_path):
    """All kernels but gather, with address and undefined-behaviour sanitizers: the same answers, no report."""
    runtime = [shutil.which("g++") and _runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(runtime):
        pytest.skip("needs the runtimes of g++'s sanitizers (Debian: libasan and libubsan of g++'s version)")
    recording, results = tmp_path / "passes.npz", tmp_path / "results.npz"
    make_recording(recording)
    expected, _ = replay(compile_emulator(64, 2, False), recording)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)]),
    }
    library = compile_emulator(64, 2, False, sanitize=True)
    command = [sys.executable, str(HERE / "replay.py"), str(library), str(recording), str(results)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "runtime error" not in run.stderr and "Sanitizer" not in run.stderr, run.stderr[-3000:]
    found = np.load(results)
    for number, answer in enumerate(expected):
        for name, array in answer.items():
            assert np.array_equal(found[f"{number}/{name}"], array, equal_nan=array.dtype.kind == "f"), name


def test_sanitizers_are_awake(tmp_path):
    """A write one past the end of a shared array is reported, so silence above means something."""
    if not _runtime("libasan.so"):
        pytest.skip("needs the runtime of g++'s address sanitizer (Debian: libasan of g++'s version)")
    broken = tmp_path / "kvfetch.cu"
    before = "  if (threadIdx.x > LEVEL) return;\n"
    source = layout.SOURCE.read_text()
    assert before in source
    broken.write_text(source.replace(before, "  if (threadIdx.x > LEVEL + 1) return;\n"))
    recording = tmp_path / "passes.npz"
    make_recording(recording, n_hard=0)
    environment = os.environ | {
        "LD_PRELOAD": _runtime("libasan.so"),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)]),
    }
    library = compile_emulator(64, 2, False, source=broken, sanitize=True)
    command = [sys.executable, str(HERE / "replay.py"), str(library), str(recording), str(tmp_path / "results.npz")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert re.search(r"insufficient space|global-buffer-overflow|out of bounds", run.stderr), run.stderr


def _runtime(name: str) -> str:
    """Path of a runtime library of g++, empty if it has none."""
    path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else ""
