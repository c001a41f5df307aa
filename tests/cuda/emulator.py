"""Compile kvfetch.cu with g++ over the emulator, and run its kernels on numpy arrays. Needs neither torch nor a GPU."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from verkv.cuda import layout
from verkv.cuda.layout import Params, Sizes

HERE = Path(__file__).parent
SANITIZE = ("-fsanitize=address,undefined", "-fsanitize=float-cast-overflow", "-fno-sanitize-recover=all", "-g")
POISON = 0xA5  # what is not written shows


def compile_emulator(
    head_dim: int, tile: int, fp16: bool, source: Path = layout.SOURCE, sanitize: bool = False
) -> Path:
    """The shared library for one compile-time shape, from a folder of this user that outlives the run."""
    compiler = shutil.which("g++")
    options = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-Werror",
    ]
    options += [f"-DVK_D={head_dim}", f"-DVK_G={tile}", f"-DVK_FP16={int(fp16)}", *(SANITIZE if sanitize else ())]
    text = b"".join(path.read_bytes() for path in (source, HERE / "cuda_emu.h", HERE / "emu_main.cpp"))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(text + repr(options).encode() + version).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"verkv-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it, or set TMPDIR")
    library = folder / f"{key}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *options, f"-I{source.parent}", "-o", str(unfinished), str(HERE / "emu_main.cpp")]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    return library


class Emulator:
    """The kernels of one compile-time shape."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))
        self.library.emu_launch.argtypes = [ctypes.c_char_p, *[ctypes.c_uint] * 3, ctypes.c_void_p]
        self.library.emu_seed.argtypes = [ctypes.c_ulonglong]
        self.library.emu_barrier_hits.restype = ctypes.c_long
        assert self.library.emu_params_bytes() == ctypes.sizeof(Params)
        assert self.library.emu_state_bytes() == layout.ROW_STATE_BYTES

    def launch(self, kernel: str, sizes: Sizes, params: Params) -> None:
        """Run one kernel to its end."""
        if self.library.emu_launch(kernel.encode(), *layout.grid(kernel, sizes), ctypes.addressof(params)):
            raise RuntimeError(f"{kernel} did not end: some threads wait where others never come")


@functools.cache
def emulator(head_dim: int = 128, tile: int = 4, fp16: bool = False) -> Emulator:
    """The emulator of one compile-time shape, compiled at most once."""
    return Emulator(compile_emulator(head_dim, tile, fp16))


class Pass:
    """One pass over one layer: inputs, buffers and parameters, launched kernel by kernel.

    Buffers are poisoned; ``peak`` and ``tickets`` are zero before, and ``check_zeroed`` tells that they are after.
    """

    def __init__(self, emulator: Emulator, sizes: Sizes, inputs: dict[str, np.ndarray], seed: int = 1, **scalars):
        self.emulator, self.sizes, self.inputs, self.scalars = emulator, sizes, inputs, scalars
        self.arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items() if array is not None}
        shapes = layout.score_buffers(sizes) | layout.plan_buffers(sizes) | layout.attend_buffers(sizes)
        for name, (shape, dtype) in shapes.items():
            if name not in inputs:
                self.arrays[name] = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, POISON, np.uint8).view(
                    dtype
                )
                self.arrays[name] = self.arrays[name].reshape(shape)
        if sizes.n_shortlist == 0 and "known" not in inputs:
            del self.arrays["known"]  # a null pointer: no token of the residual set is known
        for name, (shape, dtype) in layout.zeroed_buffers(sizes).items():
            if name not in inputs:
                self.arrays[name] = np.zeros(shape, dtype)
        emulator.library.emu_seed(seed)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def launch(self, *kernels: str, **scalars) -> "Pass":
        """Run kernels in order, with these scalars in place of the pass' own."""
        values = {"n_tokens": self.sizes.n_tokens, "n_rows": self.sizes.n_rows, "rows_all": self.sizes.rows_all}
        values |= {"n_shortlist": self.sizes.n_shortlist, "compact": 1, "max_read": 1.0} | self.scalars | scalars
        params = Params(**{name: array.ctypes.data for name, array in self.arrays.items() if array.size}, **values)
        for kernel in kernels:
            self.emulator.launch(kernel, self.sizes, params)
        return self

    def bits(self, name: str) -> np.ndarray:
        """A mask as booleans (..., T)."""
        words = self.arrays[name]
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return bits[..., : self.sizes.n_tokens].astype(bool)

    def check_zeroed(self) -> None:
        """All counters are as the next layer expects them."""
        assert not any(self[name].any() for name in layout.zeroed_buffers(self.sizes))
