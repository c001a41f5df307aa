"""Settings: files, flags over them, and what is refused."""

from pathlib import Path

import pytest

from verkv.evaluation.methods import Method
from verkv.evaluation.settings import Grid, make_settings, preset_path, read_settings

TASKS = ("vt", "cwe", "qa_1")


def settings(values=None, **flags):
    return make_settings({"tasks": ["vt"]} | (values or {}), flags, TASKS)


@pytest.fixture(autouse=True)
def _no_data(monkeypatch):
    monkeypatch.delenv("VERKV_DATA", raising=False)


def test_single_values_stand_for_lists():
    made = settings({"tasks": "cwe", "n_tokens": 500, "compression": 8, "seeds": 3, "models": "some/model"})
    assert made.models == ("some/model",)
    assert made.grids == (Grid(tasks=("cwe",), n_tokens=(500,), compression=(8.0,), seeds=(3,)),)


def test_the_demo_model_is_the_default():
    assert settings().models == settings({"models": ["SmolLM2-135M-Instruct"]}).models == (None,)


def test_further_grids_differ_in_what_they_say():
    made = settings({"tasks": ["vt", "cwe"], "compression": 16, "also": [{"tasks": ["cwe"], "compression": [8, 32]}]})
    assert [(grid.tasks, grid.compression) for grid in made.grids] == [
        (("vt", "cwe"), (16.0,)),
        (("cwe",), (8.0, 32.0)),
    ]


def test_flags_override_a_key_wherever_it_stands():
    also = [{"tasks": ["cwe"], "compression": [8, 32]}]
    made = settings({"compression": 16, "also": also, "audit": True}, compression=[4.0], n_examples=2)
    assert [(grid.tasks, grid.compression, grid.n_examples) for grid in made.grids] == [
        (("vt",), (4.0,), 2),
        (("cwe",), (4.0,), 2),
    ]
    assert made.audit


def test_methods_are_run_only_at_what_they_depend_on():
    names = ("dense", "kvzip", "poissoncomp", "verkv")
    grid = Grid(("vt",), (500,), tuple(map(Method, names)), (8.0, 16.0), (0.05, 0.1), (0.1, 0.2), (0, 1, 2))
    found = grid.settings()
    count = lambda name: sum(setting.method.name == name for setting in found)  # noqa: E731
    assert [count(name) for name in names] == [1, 2, 2 * 3, 2 * 2 * 2 * 3]
    assert found[0].compression == 1.0 and found[0].seed is None
    assert {setting.epsilon for setting in found if setting.method.name == "poissoncomp"} == {None}


def test_the_data_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VERKV_DATA", str(tmp_path))
    assert settings().data_dir == tmp_path
    assert settings(data_dir=str(tmp_path.parent)).data_dir == tmp_path.parent


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"tasks": ["xyz"]}, "no task 'xyz'"),
        ({"tasks": []}, "tasks must not be empty"),
        ({"methods": ["snapkv"]}, "no method 'snapkv'"),
        ({"methods": ["kvpress:SnapKV"]}, "no press 'SnapKV'"),
        ({"methods": ["kvpress:DecodingPress"]}, "while decoding"),
        ({"methods": [{"verkv": 3}]}, "mapping of options"),
        ({"methods": [{"dense": {"alpha": 1}}]}, "takes no options"),
        ({"methods": [{"fastkvzip": {"gates": "no/such/file"}}]}, "is not a file"),
        ({"methods": [{"verkv": {"compression": 8}}]}, "compression"),
        ({"compression": 0.5}, "compression must be a number in"),
        ({"compression": "16x"}, "compression must be a number in"),
        ({"epsilon": 0}, "epsilon must be a number in"),
        ({"delta": 1.0}, "delta must be a number in"),
        ({"seeds": -1}, "seeds must be an integer"),
        ({"n_tokens": 0}, "n_tokens must be an integer"),
        ({"n_examples": 0}, "n_examples must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer"),
        ({"n_sink": -1}, "n_sink must be an integer"),
        ({"audit": "yes"}, "audit must be true or false"),
        ({"models": []}, "models must be names"),
        ({"dtype": 32}, "dtype must be a name"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
        ({"data_dir": "no/such/folder"}, "is not a folder"),
        ({"n_token": 500}, "unknown settings"),
        ({"also": [{"audit": True}]}, "also must be a list"),
        ({"also": {"tasks": ["vt"]}}, "also must be a list"),
        ({"also": [{"tasks": ["xyz"]}]}, "no task 'xyz'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named(values, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        settings(values)
    assert "\n" not in str(caught.value)


def test_tasks_are_needed():
    with pytest.raises(ValueError, match="tasks must be given"):
        make_settings({}, {}, TASKS)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "", "\x00\x01"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match="settings file") as caught:
        read_settings(tmp_path / "s.yaml")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_settings(tmp_path / "s.yaml")


PRESETS = Path(__file__).parents[2] / "experiments" / "presets"


@pytest.mark.parametrize("name", ["laptop", "quick", "paper"])
def test_presets_are_valid(name):
    from verkv.evaluation.tasks import TASKS as REAL_TASKS

    assert preset_path(name).samefile(PRESETS / f"{name}.yaml")
    assert make_settings(read_settings(preset_path(name)), {}, REAL_TASKS).output == Path(f"outputs/{name}.jsonl")


def test_the_laptop_preset_is_what_it_promises():
    from verkv.evaluation.tasks import RULER_TASKS

    made = make_settings(read_settings(preset_path("laptop")), {}, RULER_TASKS)
    every, half = made.grids
    assert len(every.tasks) >= 8 and len(half.tasks) >= len(every.tasks) / 2 and set(half.tasks) <= set(every.tasks)
    assert (every.compression, half.compression) == ((16.0,), (8.0, 32.0))
    assert made.max_new_tokens <= 32 and every.n_tokens == half.n_tokens == (3000,)
    names = {method.name for method in every.methods}
    assert {"dense", "kvzip", "poissoncomp", "verkv", "verkv_exact"} <= names


def test_an_unknown_preset():
    with pytest.raises(ValueError, match=r"no preset 'huge'; choose from .*laptop"):
        preset_path("huge")
