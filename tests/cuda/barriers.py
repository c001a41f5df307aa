"""Remove the kernels' barriers one at a time and count how many removals the emulator catches.

``python tests/cuda/barriers.py`` tries them all, in a few minutes, and prints a line for each. A removal is
caught if results differ, a counter is left dirty, or the kernels hang or crash. Some removals cannot show here: of
barriers that order one block's writes for another (blocks run one after another), of those that a shared helper needs
in some callers only, and of those without which a list of candidates is merely longer. For such there is
``compute-sanitizer --tool racecheck`` on a device.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from agreement import log_scalars
from emulator import Pass, compile_emulator, emulator
from problems import make_codes, make_layer, make_rows
from replay import record, replay

from verkv.cuda import layout
from verkv.cuda.layout import Sizes

HERE = Path(__file__).parent
STEP = ["vk_score", "vk_shortlist", "vk_plan", "vk_emit", "vk_settle", "vk_attend"]
PLAN_ONLY = ["vk_peak", "vk_plan", "vk_emit", "vk_settle"]
SHAPE = (64, 2, False)  # head dim, rows, fp16
TIMEOUT_S = 60


def barrier_lines() -> list[int]:
    """Source lines with a barrier; no line has two."""
    lines = layout.SOURCE.read_text().splitlines()
    assert all(line.count("__syncthreads()") <= 1 for line in lines)
    return [number for number, line in enumerate(lines, 1) if re.search(r"__syncthreads\(\);", line)]


def barriers_of(function: str) -> list[int]:
    """Source lines of the barriers of one function or kernel."""
    lines = layout.SOURCE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines, 1) if re.search(rf"\b{function}\(.*\{{", line))
    last = next(number for number, line in enumerate(lines, 1) if number > first and line.startswith("}"))
    return [line for line in barrier_lines() if first < line < last]


def make_recording(path: Path, n_hard: int = 4) -> None:
    """Small passes that take every path: several chunks, crowded and tied bins, long shrinkage walks.

    Every other one bounds the two sides apart. Some barriers are missed only now and then, so the more of the hard
    passes, the more removals show.
    """
    passes, kernels = [], []
    log_terms = lambda: log_scalars((None, 0.7)[len(passes) % 2])  # noqa: E731
    for n_tokens, epsilon, sharpness in ((700, 0.05, 0.6), (5000, 0.01, 1.0), (9000, 0.02, 0.3)):
        layer = make_layer(n_tokens, 2, 64, sharpness=sharpness, seed=n_tokens)
        scalars = {"scaling": layer.scaling, "epsilon": epsilon} | log_terms()
        sizes = Sizes(2, n_tokens, 2, 2, 64, n_shortlist=40, n_splits=3)
        passes.append(Pass(emulator(*SHAPE), sizes, layer.inputs(), **scalars))
        kernels.append(STEP)
    hard = (("constant", "at_the_floor"), ("flat", "at_the_floor"), ("tied", "spread"), ("heavy_tailed", "spread"))
    for kind, code_kind in (hard * 3)[:n_hard]:
        generator = torch.Generator().manual_seed(len(passes))
        codes, logits = make_codes(code_kind, 2, 9000, generator), make_rows(kind, 2, 2, 9000, generator)
        inputs = {"codes": codes.numpy(), "logits": logits.numpy(), "tail_lse": np.zeros((2, 2), np.float32)}
        passes.append(Pass(emulator(*SHAPE), Sizes(2, 9000, 2, 2, 64), inputs, epsilon=0.02, **log_terms()))
        kernels.append(PLAN_ONLY)
    record(path, passes, kernels)


def is_caught(line: int, recording: Path, expected: list[dict[str, np.ndarray]], folder: Path) -> str:
    """How the removal of a barrier shows; empty if it does not."""
    library = compile_emulator(*SHAPE)
    command = [
        sys.executable,
        str(HERE / "replay.py"),
        str(library),
        str(recording),
        str(folder / "out.npz"),
        str(line),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "hangs"
    if run.returncode:
        return "stops: " + (run.stderr.strip().splitlines() or ["crash"])[-1][:60]
    results = np.load(folder / "out.npz")
    assert results["hits"] > 0, f"the passes never reach the barrier of line {line}"
    for number, answer in enumerate(expected):
        for name, array in answer.items():
            if not np.array_equal(array, results[f"{number}/{name}"], equal_nan=array.dtype.kind == "f"):
                return f"{name} differs"
    return ""


def check_barriers(lines: list[int], n_hard: int = 4) -> dict[int, str]:
    """How the removal of each barrier shows."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "passes.npz"
        make_recording(recording, n_hard)
        expected, _ = replay(compile_emulator(*SHAPE), recording)
        return {line: is_caught(line, recording, expected, Path(folder)) for line in lines}


if __name__ == "__main__":
    found = check_barriers(barrier_lines(), n_hard=12)
    for line, how in found.items():
        print(f"{layout.SOURCE.name}:{line}: {how or 'not caught'}")
    print(f"{sum(map(bool, found.values()))} of {len(found)} removed barriers are caught")
