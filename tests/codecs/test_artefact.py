"""The calibration's file: what it holds, and what it refuses."""

import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from verkv.codecs import Artefact, CalibrationConfig, CodecError, CorruptFileError, FormatError, VersionError
from verkv.codecs import artefact as artefact_module
from verkv.codecs.artefact import save_artefact


@pytest.fixture
def copied(calibrated, tmp_path):
    """A calibration's file that may be damaged."""
    _, artefact = calibrated("llama")
    path = tmp_path / "a.safetensors"
    path.write_bytes(artefact.path.read_bytes())
    return path


def strings_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_it_holds_what_the_model_needs(calibrated):
    model, artefact = calibrated("gemma3")
    assert artefact.layout.layers == (5,) and artefact.metadata["n_tokens"] == 4 * 246
    artefact.check_model(model)
    artefact.verify()
    side = artefact.side(0, "k")
    assert side.mean.shape == (32,) and side.steps.shape == (9, 32)
    assert artefact.side(0, "k") is side


def test_a_slice_of_the_basis_is_that_of_the_whole(calibrated):
    _, artefact = calibrated("llama")
    whole = load_file(artefact.path)["g0.v.basis"]
    assert torch.equal(artefact.basis(0, "v", slice(32, 64), 48), whole[32:64, :48])
    assert whole.dtype == torch.bfloat16


def test_held_out_errors_are_recorded_and_fall_with_the_ratio(calibrated):
    _, artefact = calibrated("llama")
    for modes in artefact.metadata["held_out_error"].values():
        for errors in modes.values():
            values = [errors[str(ratio)] for ratio in (1, 2, 4, 8, 16, 32)]
            assert values == sorted(values) and values[0] < 0.01


def test_truncated_files_are_refused(copied):
    for length in range(copied.stat().st_size - 1, -1, -997):
        os.truncate(copied, length)
        with pytest.raises(CodecError):
            Artefact(copied)


def test_flipped_bytes_are_noticed_by_verify(copied):
    data = bytearray(copied.read_bytes())
    generator = random.Random(1)
    for _ in range(40):
        position, bit = generator.randrange(len(data)), 1 << generator.randrange(8)
        data[position] ^= bit
        copied.write_bytes(data)
        try:
            Artefact(copied).verify()
            # Only what is not a tensor and does not change what the file says: white space, or a word of the record.
            assert position < 8 + int.from_bytes(data[:8], "little"), position
        except CodecError:
            pass
        data[position] ^= bit


def test_foreign_and_newer_files_are_named_as_such(copied, tmp_path):
    save_file({"x": torch.zeros(3)}, tmp_path / "other")
    (tmp_path / "text").write_text("not a safetensors file")
    for path in (tmp_path / "other", tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(FormatError):
            Artefact(path)
    save_file(load_file(copied), tmp_path / "new", {**strings_of(copied), "version": "2"})
    with pytest.raises(VersionError, match="version 2"):
        Artefact(tmp_path / "new")
    save_file(load_file(copied), tmp_path / "bad", {**strings_of(copied), "kvtc": "{"})
    with pytest.raises(CorruptFileError):
        Artefact(tmp_path / "bad")


@pytest.mark.parametrize(
    "name", ["g0.k.basis", "g0.v.table.dynamic", "g0.v.step", "rope.inv_freq", "g0.k.error.static"]
)
def test_missing_or_misshapen_tensors_are_refused(copied, tmp_path, name):
    tensors = load_file(copied)
    for changed in (None, tensors[name][1:].contiguous(), tensors[name][None]):
        others = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(others | ({} if changed is None else {name: changed}), tmp_path / "bad", strings_of(copied))
        with pytest.raises(CodecError):
            Artefact(tmp_path / "bad").verify()


def test_a_failing_save_leaves_the_previous_file(copied, monkeypatch):
    before = copied.read_bytes()

    def fail(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr(artefact_module.os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save_artefact(copied, {"x": torch.zeros(2)}, {})
    assert copied.read_bytes() == before and os.listdir(copied.parent) == [copied.name]


@pytest.mark.parametrize(
    "wrong", [{"min_ratio": 0.5}, {"sinks": -1}, {"holdout_rows": 0}, {"rank": 8}, {"n_iterations": 0}], ids=str
)
def test_wrong_settings_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CalibrationConfig(**wrong)


@pytest.mark.parametrize("layers_per_group", [0, 1.5, "two", True])
def test_wrong_groups_are_refused(calibrated, layers_per_group):
    with pytest.raises(ValueError, match="layers_per_group"):
        calibrated("llama", layers_per_group=layers_per_group)
