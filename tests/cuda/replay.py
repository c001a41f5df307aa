"""Run recorded passes in a process of their own: ``python replay.py LIBRARY RECORDING RESULTS [BARRIER_LINE]``.

For a library built with sanitizers, which must be loaded before Python's own allocations, and for kernels that lack a
barrier, which may crash or hang. Needs neither torch nor the tests.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from emulator import Emulator, Pass

from verkv.cuda.layout import Sizes

RESULTS = ("logits", "mask", "shrunk", "n_promoted", "n_row_fetched", "bound", "n_fetched", "output", "lse", "n_read")
RESULTS += ("is_exact",)


def record(path: Path, passes: list[Pass], kernels: list[list[str]]) -> None:
    """Write what is needed to run passes again, which must have the inputs that they started from."""
    arrays, description = {}, []
    for number, step in enumerate(passes):
        description.append([asdict(step.sizes), step.scalars, kernels[number]])
        arrays |= {f"{number}/{name}": array for name, array in step.inputs.items()}
    np.savez(path, description=json.dumps(description), **arrays)


def replay(library: Path, recording: Path, skipped_barrier: int = -1) -> tuple[list[dict[str, np.ndarray]], int]:
    """Results of every pass, and how often the skipped barrier was passed."""
    kernels = Emulator(library)
    kernels.library.emu_skip_barrier(skipped_barrier)
    recorded, results = np.load(recording), []
    for number, (sizes, scalars, names) in enumerate(json.loads(str(recorded["description"]))):
        prefix = f"{number}/"
        inputs = {name.removeprefix(prefix): recorded[name] for name in recorded.files if name.startswith(prefix)}
        step = Pass(kernels, Sizes(**sizes), inputs, seed=number + 1, **scalars).launch(*names)
        step.check_zeroed()
        results.append(step_results(step))
    return results, int(kernels.library.emu_barrier_hits())


def step_results(step: Pass) -> dict[str, np.ndarray]:
    """What later steps depend on. Of the fetch list, the part that is one."""
    results = {name: step[name] for name in RESULTS}
    listed = [step["fetch_positions"][unit, :n] for unit, n in enumerate(step["n_fetched"].clip(0))]
    return results | {"fetch_positions": np.concatenate([*listed, np.zeros(0, np.int32)])}


if __name__ == "__main__":
    answers, hits = replay(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[4:]))
    flat = {f"{number}/{name}": array for number, answer in enumerate(answers) for name, array in answer.items()}
    np.savez(sys.argv[3], hits=hits, **flat)
