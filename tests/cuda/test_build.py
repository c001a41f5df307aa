"""The cache of compiled kernels: compiled once, trusted only if it is this user's and whole."""

import hashlib
import multiprocessing
import os
import stat
import threading

import pytest

from verkv.cuda import build

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners of files are unknown on this system")

HOPPER = (9, 0)
OPTIONS = build.compile_options(128, 4, False)


class Nvrtc:
    """Stands for the bindings: a version is all that the cache asks for."""

    __name__ = "nvrtc"
    version = (0, 13, 0)

    def nvrtcVersion(self):
        return self.version


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """List of what was compiled, with a fake compiler and a cache folder of this test."""
    calls = []

    def compile_kernels(architecture, options, source=None):
        calls.append((architecture, options))
        return f"code {architecture} {options}".encode() * 100

    monkeypatch.setattr(build, "compile_kernels", compile_kernels)
    monkeypatch.setattr(build, "nvrtc_bindings", lambda: Nvrtc())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._warn_once.cache_clear()
    return calls


def cached_file(tmp_path):
    (path,) = (tmp_path / "verkv").iterdir()
    return path


def test_second_use_compiles_nothing(compiled):
    assert build.cached_kernels(HOPPER, OPTIONS) == build.cached_kernels(HOPPER, OPTIONS)
    assert len(compiled) == 1


@pytest.mark.parametrize("what", ["architecture", "options", "version", "source"])
def test_everything_that_matters_is_in_the_key(compiled, monkeypatch, tmp_path, what):
    build.cached_kernels(HOPPER, OPTIONS)
    architecture, options = HOPPER, OPTIONS
    if what == "architecture":
        architecture = (10, 0)
    elif what == "options":
        options = build.compile_options(128, 5, False)
    elif what == "version":
        monkeypatch.setattr(Nvrtc, "version", (0, 13, 1))
    else:
        changed = tmp_path / "kvfetch.cu"
        changed.write_bytes(build.SOURCE.read_bytes() + b"\n")
        monkeypatch.setattr(build, "SOURCE", changed)
    build.cached_kernels(architecture, options)
    assert len(compiled) == 2


def test_folder_and_file_are_private(compiled, tmp_path):
    (tmp_path / "verkv").mkdir(mode=0o777)
    build.cached_kernels(HOPPER, OPTIONS)
    assert stat.S_IMODE((tmp_path / "verkv").stat().st_mode) == 0o700
    assert stat.S_IMODE(cached_file(tmp_path).stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "writable_by_all", "link", "fifo", "of_another_user"])
def test_a_file_that_cannot_be_trusted_is_compiled_anew(compiled, monkeypatch, tmp_path, damage):
    good = build.cached_kernels(HOPPER, OPTIONS)
    path = cached_file(tmp_path)
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "changed":
        path.write_bytes(content[:-1] + b"?")
    elif damage == "empty":
        path.write_bytes(hashlib.sha256(b"").digest())
    elif damage == "writable_by_all":
        path.chmod(0o666)
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        status, other = os.fstat, os.getuid() + 1
        values = lambda s: [*s[:4], other, *s[5:]]  # noqa: E731
        monkeypatch.setattr(build.os, "fstat", lambda fd: os.stat_result(values(status(fd))))
    assert build.cached_kernels(HOPPER, OPTIONS) == good
    assert len(compiled) == 2
    if damage != "of_another_user":
        assert build.cached_kernels(HOPPER, OPTIONS) == good
        assert len(compiled) == 2 and not cached_file(tmp_path).is_symlink()


@pytest.mark.parametrize("trouble", ["a_file_in_its_place", "a_link_in_its_place", "of_another_user"])
def test_a_folder_that_cannot_be_trusted_is_not_used(compiled, monkeypatch, tmp_path, trouble):
    folder = tmp_path / "verkv"
    if trouble == "a_file_in_its_place":
        folder.write_text("")
    elif trouble == "a_link_in_its_place":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        somebody = os.getuid() + 1
        monkeypatch.setattr(build.os, "getuid", lambda: somebody)
    with pytest.warns(UserWarning, match="compiled in every process"):
        build.cached_kernels(HOPPER, OPTIONS)
    build.cached_kernels(HOPPER, OPTIONS)
    assert len(compiled) == 2
    assert not any((tmp_path / "elsewhere").glob("*"))


def test_a_full_disk_costs_only_the_cache(compiled, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.os, "replace", full)
    assert build.cached_kernels(HOPPER, OPTIONS)
    assert not list((tmp_path / "verkv").iterdir())


def test_threads_and_processes_may_race(compiled, tmp_path):
    threads = [threading.Thread(target=build.cached_kernels, args=(HOPPER, OPTIONS)) for _ in range(8)]
    processes = [
        multiprocessing.get_context("fork").Process(target=build.cached_kernels, args=(HOPPER, OPTIONS)) for _ in "ab"
    ]
    for worker in [*threads, *processes]:
        worker.start()
    for worker in [*threads, *processes]:
        worker.join()
    before = len(compiled)
    build.cached_kernels(HOPPER, OPTIONS)
    assert len(compiled) == before and cached_file(tmp_path).name.startswith("kvfetch-")


def test_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert build.cache_folder().is_absolute() and build.cache_folder().parts[-2:] == (".cache", "verkv")
