"""nvcc and NVRTC compile the file for data-centre GPUs, within bounds on registers, shared memory and spills."""

import re
import shutil
import subprocess

import pytest

from verkv.cuda import build, layout
from verkv.cuda.layout import KERNELS

# The commonest shape and the largest for every architecture, and the smallest head dim with the largest tile for one.
CASES = [(arch, *shape) for arch in ("sm_80", "sm_90", "sm_100") for shape in ((128, 4, False), (256, 8, True))]
CASES += [("sm_90", 64, 8, False)]
# Registers a thread: with 256 threads, 128 leave room for two blocks on a multiprocessor, 255 for one.
MAX_REGISTERS = dict.fromkeys(KERNELS, 128) | {"vk_attend": 255}
STATIC_SHARED_BYTES = 48 << 10
NVCC = shutil.which("nvcc")


def resources(report: str) -> dict[str, dict[str, int]]:
    """Registers, shared memory and spills of each kernel, from what ptxas says."""
    found = {}
    for part in report.split("Compiling entry function '")[1:]:
        number = lambda pattern, part=part: int((re.search(pattern, part) or [0, 0])[1])  # noqa: E731
        found[part.split("'")[0]] = {
            "registers": number(r"Used (\d+) registers"),
            "shared": number(r"(\d+) bytes smem"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spills": number(r"(\d+) bytes spill stores"),
        }
    return found


@pytest.mark.skipif(NVCC is None, reason="needs nvcc of a CUDA toolkit")
@pytest.mark.parametrize(("architecture", "head_dim", "tile", "fp16"), CASES)
def test_nvcc_compiles_without_spills(architecture, head_dim, tile, fp16, tmp_path, record_property):
    options = [
        option.replace("--use_fast_math", "-use_fast_math") for option in build.compile_options(head_dim, tile, fp16)
    ]
    options += [f"-arch={architecture}", "-Xptxas=-v", "-Werror=all-warnings"]
    command = [NVCC, *options, "-cubin", "-o", str(tmp_path / "kvfetch.cubin"), str(layout.SOURCE)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = resources(run.stderr)
    print(f"\n{architecture}, head dim {head_dim}, {tile} rows, {'fp16' if fp16 else 'bf16'}")
    for kernel in KERNELS:
        used = found[kernel]
        print(f"  {kernel:13} {used['registers']:4} registers {used['shared']:6} B shared {used['spills']:3} B spilled")
        record_property(kernel, str(used))
        assert used["spills"] == 0 and used["stack"] == 0, kernel
        assert 0 < used["registers"] <= MAX_REGISTERS[kernel], kernel
        assert used["shared"] <= STATIC_SHARED_BYTES, kernel


@pytest.fixture(scope="module")
def nvrtc():
    try:
        return build.nvrtc_bindings()
    except build.CudaUnavailable as error:
        pytest.skip(f"needs NVRTC (pip install cuda-bindings nvidia-cuda-nvrtc): {error}")


@pytest.mark.parametrize("architecture", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_nvrtc_compiles(nvrtc, architecture):
    """What a user's machine does at first use, which needs neither a device nor a driver."""
    code = build.compile_kernels(architecture, build.compile_options(128, 4, False))
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() in code for name in KERNELS)


def test_nvrtc_leaves_a_device_it_does_not_know_to_the_driver(nvrtc):
    code = build.compile_kernels((99, 0), build.compile_options(128, 4, False))
    assert b".target sm_" in code and all(name.encode() in code for name in KERNELS)


def test_nvrtc_says_what_is_wrong(nvrtc):
    with pytest.raises(build.CudaUnavailable, match='identifier "nonsense" is undefined'):
        build.compile_kernels((9, 0), build.compile_options(128, 4, False), b"int x = nonsense;")
