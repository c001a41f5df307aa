"""Tiny calibrated models: every kind is calibrated once per session."""

import pytest
import torch

from verkv import make_cache
from verkv.codecs import CalibrationConfig, KvtcConfig, calibrate
from verkv.codecs.kvtc import KVTC


def prefilled(model, n_tokens: int, seed: int = 5):
    """Token ids (1, T) and the cache of a random text."""
    ids = torch.randint(3, 256, (1, n_tokens), generator=torch.Generator().manual_seed(seed))
    cache = make_cache(model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    return ids, cache


@pytest.fixture(scope="session")
def calibrated(tiny_model, tmp_path_factory):
    """Factory ``calibrated(kind, **settings)`` of (model, calibration), made once for the same arguments."""
    made = {}

    def build(kind: str, **settings):
        key = kind, tuple(sorted(settings.items()))
        if key not in made:
            model = tiny_model(kind)
            generator = torch.Generator().manual_seed(1)
            texts = [torch.randint(3, 256, (250,), generator=generator) for _ in range(4)]
            path = tmp_path_factory.mktemp("calibration") / f"{kind}.safetensors"
            made[key] = model, calibrate(model, texts, path, CalibrationConfig(**{"min_ratio": 1.0, **settings}))
        return made[key]

    return build


@pytest.fixture(scope="session")
def codec_of(calibrated):
    """Factory ``codec_of(kind, settings, **config)`` of (model, codec)."""

    def build(kind: str = "llama", settings: dict | None = None, **config):
        model, artefact = calibrated(kind, **(settings or {}))
        small = {"sinks": 4, "window": 16, "block_tokens": 64}
        return model, KVTC(artefact, model, KvtcConfig(**{**small, **config}))

    return build


@pytest.fixture(scope="session")
def prefill():
    """:func:`prefilled`, for test files, which cannot import it."""
    return prefilled
