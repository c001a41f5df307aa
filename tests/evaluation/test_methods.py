"""Methods by name: what press each is, what a line says of it, and what is refused."""

import json

import pytest
from kvpress import AdaKVPress, ComposedPress, ExpectedAttentionPress, KnormPress, SnapKVPress, ThinKPress

from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress
from verkv.evaluation.methods import KNOWN, Protection, Setting, describe, make_press, parse_method

PROTECTION = Protection(8, 16)


def press_of(entry, compression=16.0, **kwargs):
    setting = Setting(parse_method(entry), compression, 0.05, 0.1, 3)
    return make_press(setting, PROTECTION, **kwargs)


def described(entry, compression=16.0):
    setting = Setting(parse_method(entry), compression, 0.05, 0.1, 3)
    return describe(setting, make_press(setting, PROTECTION))


@pytest.mark.parametrize(
    ("name", "cls"),
    {
        "kvzip": KVzipPress,
        "fastkvzip": FastKVzipPress,
        "poissoncomp": PoissonCompPress,
        "verkv": VerKVPress,
        "verkv_exact": VerKVPress,
        "verkv_default": VerKVPress,
        "verkv_fastkvzip": VerKVPress,
        "verkv_everything": VerKVPress,
    }.items(),
)
def test_presses_of_names(name, cls):
    press = press_of(name, draw_seed=11, audit=True)
    assert type(press) is cls and press.compression_ratio == 1 - 1 / 16 and press.audit
    if isinstance(press, PoissonCompPress):
        assert (press.seed, press.n_sink, press.n_local) == (11, 8, 16)
        assert isinstance(press.press, FastKVzipPress if name == "verkv_fastkvzip" else KVzipPress)
    line = described(name)
    assert line["label"] == KNOWN[name].label
    json.dumps(line, allow_nan=False)


@pytest.mark.parametrize("name", ["dense", "dense_offloaded"])
def test_dense_has_no_press(name):
    assert press_of(name, 1.0) is None
    assert described(name, 1.0)["options"] == {}


def test_sketches():
    sketches = {name: described(name)["sketch"] for name in ("verkv", "verkv_exact", "verkv_default", "kvzip")}
    assert sketches == {"verkv": "rope_pair", "verkv_exact": "exact", "verkv_default": "transform", "kvzip": None}


def test_options_are_those_the_press_really_has():
    """Also those that depend on others, so that a line tells the algorithm that ran."""
    default, paper = described("verkv")["options"], described({"verkv": {"paper": True}})["options"]
    assert (default["alpha"], default["shortlist"], default["paper"]) == (0.5, 0, False)
    assert (paper["alpha"], paper["shortlist"], paper["paper"]) == (0.0, 128, True)
    assert default["n_sink"] == 8 and default["n_local"] == 16 and default["budget_scope"] == "head"
    assert described({"verkv": {"n_sink": 5}})["options"]["n_sink"] == 5
    assert described("kvzip")["options"] == {"budget_scope": "model", "n_sink": 4}


def test_a_label_of_ones_own():
    assert described({"verkv": {"label": "mine", "paper": True}})["label"] == "mine"


@pytest.mark.parametrize(("n_tokens", "expected"), [(500, 4), (3000, 8), (24_000, 64), (131_072, 64)])
def test_protection_is_scaled_to_the_length(n_tokens, expected):
    assert Protection.scaled(n_tokens, None, None) == Protection(expected, expected)
    assert Protection.scaled(n_tokens, 1, None) == Protection(1, expected)


class TestForeign:
    @pytest.mark.parametrize(
        ("name", "ratio"),
        [
            ("SnapKVPress", "compression_ratio"),
            ("TOVAPress", "compression_ratio"),
            ("CompactorPress", "compression_ratio"),
            ("ExpectedAttentionPress", "compression_ratio"),
            ("ObservedAttentionPress", "compression_ratio"),
            ("ThinKPress", "key_channel_compression_ratio"),
            ("DuoAttentionPress", "head_compression_ratio"),
        ],
    )
    def test_rate(self, name, ratio):
        press = press_of(f"kvpress:{name}", 8.0)
        assert type(press).__name__ == name and getattr(press, ratio) == 0.875

    def test_options(self):
        press = press_of({"kvpress:SnapKVPress": {"window_size": 12}})
        assert isinstance(press, SnapKVPress) and press.window_size == 12
        assert described({"kvpress:SnapKVPress": {"window_size": 12}})["options"] == {"window_size": 12}

    def test_presses_around_presses(self):
        press = press_of({"kvpress:AdaKVPress": {"press": {"ExpectedAttentionPress": {"n_sink": 2}}}}, 4.0)
        assert isinstance(press, AdaKVPress) and isinstance(press.press, ExpectedAttentionPress)
        assert press.press.n_sink == 2 and press.press.compression_ratio == 0.75

    def test_without_a_rate(self):
        inner = [{"KnormPress": {"compression_ratio": 0.5}}, {"ThinKPress": {"key_channel_compression_ratio": 0.5}}]
        entry = {"kvpress:ComposedPress": {"presses": inner, "compression": None}}
        press = press_of(entry, None)
        assert isinstance(press, ComposedPress)
        assert [type(p) for p in press.presses] == [KnormPress, ThinKPress]
        with pytest.raises(ValueError, match="compression: null"):
            press_of({"kvpress:ComposedPress": {"presses": inner}}, 8.0)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"verkv": {"alpah": 1}}, "method verkv: .*alpah"),
        ({"verkv": {"alpha": 2}}, "method verkv: alpha"),
        ({"verkv": {"epsilon": 0.1}}, "epsilon cannot be options"),
        ({"kvzip": {"compression_ratio": 0.1}}, "compression_ratio cannot be options"),
        ({"kvpress:SnapKVPress": {"size": 1}}, "method kvpress:SnapKVPress: .*size"),
        ({"kvpress:AdaKVPress": {"press": "NoPress"}}, "no press 'NoPress'"),
    ],
)
def test_what_is_wrong_is_named(entry, complaint):
    with pytest.raises(ValueError, match=complaint):
        press_of(entry)


def test_gates_are_known_by_their_content(tmp_path):
    """A file that is trained anew under its name gives other answers."""
    gates = tmp_path / "gates.pt"
    gates.write_bytes(b"one")
    first = described({"fastkvzip": {"gates": str(gates)}})["options"]["gates"]
    gates.write_bytes(b"two")
    assert described({"fastkvzip": {"gates": str(gates)}})["options"]["gates"] != first
