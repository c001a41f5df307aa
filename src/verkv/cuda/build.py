"""Compile ``kvfetch.cu`` with NVRTC at first use, keep the result in the user's cache, and load it.

NVRTC and its Python bindings come with torch's CUDA wheels; no compiler, header or build step is needed.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import secrets
import stat
import warnings
from pathlib import Path
from types import ModuleType

from verkv.cuda.layout import KERNELS, SOURCE

MIN_CAPABILITY = (8, 0)
_DIGEST_BYTES = hashlib.sha256().digest_size


class CudaUnavailable(RuntimeError):
    """The kernels cannot be used here; the message says why and what would help."""


def compile_options(head_dim: int, tile: int, fp16: bool) -> tuple[str, ...]:
    """Options that fix a compile-time shape."""
    shape = (f"-DVK_D={head_dim}", f"-DVK_G={tile}", f"-DVK_FP16={int(fp16)}")
    return ("--std=c++17", "--use_fast_math", *shape)


def nvrtc_bindings() -> ModuleType:
    """``cuda.bindings.nvrtc``, usable.

    Raises
    ------
    CudaUnavailable
        If the bindings or the library they bind are missing.
    """
    return _bindings("nvrtc", lambda module: module.nvrtcVersion())


def driver_bindings() -> ModuleType:
    """``cuda.bindings.driver``, initialised.

    Raises
    ------
    CudaUnavailable
        If the bindings or the driver are missing.
    """
    return _bindings("driver", lambda module: check(module, module.cuInit(0)))


def _bindings(name: str, probe) -> ModuleType:
    try:
        module = importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise CudaUnavailable(
            f"cuda.bindings is missing ({error}). It comes with torch's CUDA wheels since 2.11; or pip install "
            f"cuda-bindings, of the version of torch.version.cuda"
        ) from None
    try:
        probe(module)
    except CudaUnavailable:
        raise
    except Exception as error:  # the bindings raise exceptions of their own for a library that is not found
        raise CudaUnavailable(f"the library behind cuda.bindings.{name} cannot be loaded: {error}") from None
    return module


def check(module: ModuleType, result: tuple):
    """What a call into the bindings returned, without its status.

    Raises
    ------
    CudaUnavailable
        If the status is not success.
    """
    status, *values = result
    if int(status):
        raise CudaUnavailable(f"{module.__name__} answered {status.name}")
    return values[0] if len(values) == 1 else values


def compile_kernels(architecture: tuple[int, int], options: tuple[str, ...], source: bytes | None = None) -> bytes:
    """Machine code of the kernels for one device, or PTX where NVRTC does not know the device yet.

    Parameters
    ----------
    architecture : tuple of int
        Compute capability of the device.
    options : tuple of str
        Of :func:`compile_options`.
    source : bytes, optional
        Text of ``kvfetch.cu`` by default.

    Raises
    ------
    CudaUnavailable
        If NVRTC is missing or refuses.
    """
    nvrtc = nvrtc_bindings()
    known = check(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    wanted = architecture[0] * 10 + architecture[1]
    is_known = wanted in known
    target = f"sm_{wanted}" if is_known else f"compute_{max((a for a in known if a <= wanted), default=known[0])}"
    text = SOURCE.read_bytes() if source is None else source
    program = check(nvrtc, nvrtc.nvrtcCreateProgram(text, SOURCE.name.encode(), 0, [], []))
    arguments = [option.encode() for option in (f"--gpu-architecture={target}", *options)]
    status = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)[0]
    if int(status):
        log = b" " * check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaUnavailable(f"NVRTC cannot compile {SOURCE.name} for {target}:\n{log.decode(errors='replace')}")
    size, read = ("nvrtcGetCUBINSize", "nvrtcGetCUBIN") if is_known else ("nvrtcGetPTXSize", "nvrtcGetPTX")
    code = b" " * check(nvrtc, getattr(nvrtc, size)(program))
    check(nvrtc, getattr(nvrtc, read)(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


# --- the cache on disk ----------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/verkv``, or ``~/.cache/verkv``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "verkv"


def cached_kernels(architecture: tuple[int, int], options: tuple[str, ...]) -> bytes:
    """:func:`compile_kernels`, or what it returned before for the same source, options, NVRTC and architecture.

    A file is used only if it belongs to this user, nobody else may write it, and its content has the hash it starts
    with. The hash guards against files cut short, not against whoever may write as this user.

    Raises
    ------
    CudaUnavailable
        As :func:`compile_kernels`.
    """
    nvrtc = nvrtc_bindings()
    source = SOURCE.read_bytes()
    version = check(nvrtc, nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((hashlib.sha256(source).hexdigest(), options, version, architecture)).encode())
    try:
        folder = _own_folder(cache_folder())
    except OSError as error:
        _warn_once(f"compiled kernels cannot be kept in {cache_folder()} ({error}): they are compiled in every process")
        return compile_kernels(architecture, options, source)
    path = folder / f"kvfetch-{key.hexdigest()}.bin"
    code = _read_own(path)
    if code is None:
        code = compile_kernels(architecture, options, source)
        with contextlib.suppress(OSError):  # a full disk only costs the next process a compilation
            _write_own(path, code)
    return code


def _own_folder(folder: Path) -> Path:
    """The folder, made if it is missing; refuses one that others could write to."""
    if not hasattr(os, "getuid"):
        raise PermissionError("owners of files are unknown on this system")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError("it is not a folder")
    if status.st_uid != os.getuid():
        raise PermissionError("it belongs to another user")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _read_own(path: Path) -> bytes | None:
    """Content behind the hash, or None if there is no such file or it cannot be trusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            return None
        content = file.read()
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write_own(path: Path, code: bytes) -> None:
    """Write beside the path, then rename: a reader sees all or nothing, and the last writer wins."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


# --- loading --------------------------------------------------------------------------------------------------------


@functools.cache
def load_kernels(device_index: int, head_dim: int, tile: int, fp16: bool) -> dict[str, object]:
    """Handles of the kernels on one device, compiled and loaded at most once a process.

    Raises
    ------
    CudaUnavailable
        If the kernels cannot be compiled or loaded.
    """
    import torch

    driver = driver_bindings()
    with torch.cuda.device(device_index):
        torch.empty(1, device=f"cuda:{device_index}")  # makes torch's context current in this thread
        code = cached_kernels(torch.cuda.get_device_capability(device_index), compile_options(head_dim, tile, fp16))
        module = check(driver, driver.cuModuleLoadData(code))
        return {name: check(driver, driver.cuModuleGetFunction(module, name.encode())) for name in KERNELS}
