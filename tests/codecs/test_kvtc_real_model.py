"""On the demo model: the likelihood of what follows survives coding, and does not survive coding the sinks."""

import copy
from pydoc_data.topics import topics

import pytest
import torch
from transformers import DynamicCache

from verkv.codecs import CalibrationConfig, KvtcConfig, calibrate
from verkv.codecs.kvtc import KVTC

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:residuals are larger"),
]


@pytest.fixture(scope="module")
def case(demo_model, tmp_path_factory):
    """Model, a calibration on 2,000 tokens of one topic, and a context with its continuation from another one."""
    model, tokenizer = demo_model
    ids = tokenizer(topics["compound"], return_tensors="pt").input_ids[0, :2000]
    path = tmp_path_factory.mktemp("kvtc") / "demo.safetensors"
    settings = CalibrationConfig(layers_per_group=3, min_ratio=8.0)
    artefact = calibrate(model, ids.split(1000), path, settings)
    test = tokenizer(topics["specialnames"], return_tensors="pt").input_ids[:, :600]
    cache = DynamicCache()
    with torch.no_grad():
        model.model(input_ids=test[:, :500], past_key_values=cache)
    return model, artefact, cache, test


def likelihood(model, cache, test):
    """Mean negative log-likelihood of the last tokens over a context's cache."""
    with torch.no_grad():
        logits = model(input_ids=test[:, 500:-1], past_key_values=copy.deepcopy(cache)).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, test[0, 501:]))


def test_coding_costs_little_likelihood_and_coding_sinks_much(case):
    model, artefact, cache, test = case
    exact = likelihood(model, cache, test)
    cost = {}
    for sinks in (4, 0):
        # Without outliers: they would rescue the sinks.
        codec = KVTC(artefact, model, KvtcConfig(ratio=8.0, sinks=sinks, window=32, outlier_fraction=0.0))
        cost[sinks] = likelihood(model, codec.compress(cache).restore(), test) - exact
    assert abs(cost[4]) < 0.1 < 0.3 < cost[0], cost


def test_sinks_are_found_as_outliers(case):
    model, artefact, cache, _ = case
    codec = KVTC(artefact, model, KvtcConfig(ratio=8.0, sinks=0, window=32))
    assert 0 in codec.compress(cache).exact_index.tolist()
