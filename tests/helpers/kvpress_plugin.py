"""A pytest plugin that runs KVPress' own press tests with VerKV's presses, and without a hub.

Loaded by ``tests/presses/test_kvpress_matrix.py`` in a process of its own. ``VERKV_TINY_LLAMA`` names the folder that
stands in for the hub model of those tests. At the end it reports what the contexts were made into.
"""

import collections
import os
from dataclasses import dataclass

import torch
import transformers
from kvpress import AdaKVPress, KnormPress, SnapKVPress
from kvpress import KVzipPress as KVPressKVzipPress
from kvpress.presses.fastkvzip_press import FastKVzipGate

import verkv
from verkv.presses.sealing_press import SealingPress

HUB_NAME = "maxjeblick/llama2-0b-unit-test"
KWARGS = [{"compression_ratio": 0.2}, {"compression_ratio": 0.8}]
SHORT = {"n_sink": 4, "n_local": 8}  # KVPress' contexts have 128 tokens: with 64 + 64 all are protected

contexts = collections.Counter()  # per press class: sealed, exact


def resolve_locally(auto_class):
    """Let an Auto class find the local folder under the hub's name."""
    load = auto_class.from_pretrained.__func__

    def from_pretrained(cls, name, *args, **kwargs):
        if str(name).lower() == HUB_NAME:
            name = os.environ["VERKV_TINY_LLAMA"]
        return load(cls, name, *args, **kwargs)

    auto_class.from_pretrained = classmethod(from_pretrained)


def random_gates():
    """Fast KVzip gates of the tiny Llama, one per layer."""
    config = transformers.AutoConfig.from_pretrained(HUB_NAME)
    n_heads = config.num_key_value_heads
    group = config.num_attention_heads // n_heads
    return [
        FastKVzipGate(i, config.hidden_size, n_heads, group, torch.float32) for i in range(config.num_hidden_layers)
    ]


def press_class(base, name, make_press=None, **defaults):
    """A press class that KVPress' tests can build from a compression ratio alone."""

    @dataclass
    class Press(base):
        def __init__(self, compression_ratio):
            if make_press is not None:
                defaults["press"] = make_press()
            super().__init__(compression_ratio=compression_ratio, **defaults)

    Press.__name__ = Press.__qualname__ = name
    return {"cls": Press, "kwargs": KWARGS}


def our_presses():
    """PoissonComp and VerKV over all kinds of scores, with the default protection and a short one; scorers alone."""
    from tests.default_presses import TestFastKVzipPress  # KVPress' tests: its gates are random

    scorers = {
        "Knorm": KnormPress,
        "SnapKV": lambda: SnapKVPress(window_size=2),
        "KVPressKVzip": KVPressKVzipPress,
        "KVzip": verkv.KVzipPress,
        "KVPressFastKVzip": TestFastKVzipPress,
        "FastKVzip": lambda: verkv.FastKVzipPress(gates=random_gates()),
        "AdaKV": lambda: AdaKVPress(KnormPress()),
    }
    presses = []
    for suffix, ends in (("", {}), ("Short", SHORT)):
        for name, scorer in scorers.items():
            presses.append(press_class(verkv.PoissonCompPress, f"PoissonComp{name}{suffix}", scorer, **ends))
        for sketch in ("rope_pair", "exact"):
            presses.append(press_class(verkv.VerKVPress, f"VerKV_{sketch}{suffix}", KnormPress, sketch=sketch, **ends))
    presses.append(press_class(verkv.KVzipPress, "KVzip"))
    presses.append(press_class(verkv.FastKVzipPress, "FastKVzip", gates=random_gates()))
    return presses


def count_contexts():
    """Count, per press class, the contexts that were sealed and those that were left exact."""
    seal = SealingPress.seal

    def counting_seal(self, model, cache, scores, **kwargs):
        seal(self, model, cache, scores, **kwargs)
        contexts[type(self).__name__, "sealed" if self.stats.sealed_layers else "exact"] += 1

    SealingPress.seal = counting_seal


def pytest_configure(config):
    for auto_class in (transformers.AutoConfig, transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        resolve_locally(auto_class)
    import tests.default_presses

    tests.default_presses.default_presses = our_presses()
    count_contexts()


def pytest_terminal_summary(terminalreporter):
    import tests.default_presses

    names = [press["cls"].__name__ for press in tests.default_presses.default_presses]
    for name in names:
        sealed, exact = contexts[name, "sealed"], contexts[name, "exact"]
        terminalreporter.write_line(f"PRESS {name} sealed={sealed} exact={exact}")
