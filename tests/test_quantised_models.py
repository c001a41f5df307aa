"""Models with quantised weights: keys and queries come from int8 linear layers, VerKV adds nothing to their error."""

import warnings

import pytest
import torch
from kvpress import KnormPress, SnapKVPress
from kvpress.presses.fastkvzip_press import FastKVzipGate
from press_helpers import SHORT, full_layers, leftovers, prefill, random_ids
from sealing import forward, seal
from torch import Tensor, nn
from transformers import DynamicCache

from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress, make_cache

N_CONTEXT, WIDTHS = 80, (4, 1, 1, 3)
EXACT = {"epsilon": 1e-9, "shortlist": 4, "seed": 0, **SHORT}
KINDS = ["llama", "gemma3", "qwen3_5"]


# --- ways to quantise -------------------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Weights of 8 bits with a scale per row, as weight-only quantisation keeps them; multiplied in full precision."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def weight_only(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
    return model


def dynamic(model):
    """torch's own: activations are quantised, too, with a scale that each forward pass finds anew."""
    engines = [name for name in torch.backends.quantized.supported_engines if name in ("x86", "fbgemm", "qnnpack")]
    if not engines:
        pytest.skip(f"needs an engine for int8 matrix products; this torch has {torch.backends.quantized.engine}")
    torch.backends.quantized.engine = engines[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def torchao(model):
    pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def quanto(model):
    pytest.importorskip("optimum.quanto", reason="needs Quanto: pip install optimum-quanto")
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8)
    freeze(model)
    return model


QUANTISED = {"weight_only": weight_only, "dynamic": dynamic, "torchao": torchao, "quanto": quanto}


@pytest.fixture
def quantised(tiny_model):
    """``quantised(kind, how)``: a quantised model, and its twin in float64 with the weights it computes with."""
    engine = torch.backends.quantized.engine

    def make(kind, how, **options):
        model, twin = QUANTISED[how](tiny_model(kind, **options)), tiny_model(kind, **options)
        n_quantised = 0
        for name, module in list(twin.named_modules()):
            if type(module) is nn.Linear:
                weight = dequantised(model.get_submodule(name))
                n_quantised += not torch.equal(weight, module.weight)
                module.weight = nn.Parameter(weight.double(), requires_grad=False)  # untied from the embedding
        assert n_quantised >= 5 * model.config.num_hidden_layers  # rounding moved all of them
        return model, twin.double()

    yield make
    torch.backends.quantized.engine = engine


def dequantised(linear) -> Tensor:
    if isinstance(linear, Int8Linear):
        return linear.codes * linear.scale
    weight = linear.weight() if callable(linear.weight) else linear.weight
    return weight.detach().dequantize()


# --- presses ----------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """Enough of a tokenizer for KVzip's replay with a vocabulary of 256."""

    chat_template = None

    def encode(self, text, return_tensors="pt", add_special_tokens=False):
        return torch.tensor([[3 + byte % 250 for byte in text.encode()[::8]]])


def gates(config):
    group = config.num_attention_heads // config.num_key_value_heads
    sizes = config.hidden_size, config.num_key_value_heads, group
    return [FastKVzipGate(i, *sizes, torch.float32) for i in range(config.num_hidden_layers)]


SCORERS = {
    "knorm": lambda config: KnormPress(),
    "kvzip": lambda config: KVzipPress(0.5, tokenizer=ByteTokenizer(), chunk_size=30),
    "fastkvzip": lambda config: FastKVzipPress(0.5, gates=gates(config)),
}


def sealed_cache(model, press_name):
    """A sealed cache that leaves nothing out."""
    cache = make_cache(model.config)
    if press_name == "certain":
        prefill(model, ids(), cache=cache)
        seal(model, cache)
    else:
        prefill(model, ids(), VerKVPress(SCORERS[press_name](model.config), 0.4, **EXACT), cache=cache)
    assert full_layers(cache) and leftovers(model) == []
    return cache


def ids():
    return random_ids(1, N_CONTEXT)


def tokens():
    return random_ids(1, sum(WIDTHS), seed=7)


def logits(model, cache):
    return torch.cat([forward(model, part, cache) for part in tokens().split(WIDTHS, 1)], 1)


def errors(model, twin, press_name):
    """Errors against the twin of dense and of a sealed cache, over the same passes, and what lies between the two."""
    with torch.no_grad():
        reference = twin(torch.cat([ids(), tokens()], 1), use_cache=False).logits[:, N_CONTEXT:]
    dense = logits(model, prefill(model, ids(), cache=make_cache(model.config))).double()
    ours = logits(model, sealed_cache(model, press_name)).double()
    assert ours.isfinite().all()
    return (dense - reference).abs(), (ours - reference).abs(), (ours - dense).abs()


@pytest.mark.parametrize("press_name", ["certain", *SCORERS])
@pytest.mark.parametrize("how", QUANTISED)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_that_of_the_dense_quantised_model(quantised, kind, how, press_name):
    """With everything resident, or everything fetched: at most twice dense's own error."""
    dense, ours, apart = errors(*quantised(kind, how), press_name)
    assert ours.mean() <= 2 * dense.mean() and ours.max() <= 2 * dense.max()
    if how == "dynamic":  # activations are rounded to 8 bits: that is most of the error, and the same for both
        assert apart.mean() <= 0.1 * dense.mean()
    else:
        assert dense.max() < 1e-4


@pytest.mark.parametrize("press_name", ["certain", *SCORERS])
def test_half_precision(quantised, press_name):
    model, twin = quantised("llama", "weight_only")
    model.to(torch.bfloat16)
    dense, ours, _ = errors(model, twin, press_name)
    assert ours.mean() <= 2 * dense.mean() and ours.max() <= 2 * dense.max()


@pytest.mark.parametrize("how", ["weight_only", "dynamic"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_lossy_presses(quantised, scorer, how):
    """PoissonComp with the scores, and the scorer alone where it is one of ours: they drop tokens, and say how many."""
    model, _ = quantised("llama", how)
    dense = logits(model, prefill(model, ids(), cache=make_cache(model.config)))
    presses = [lambda: PoissonCompPress(SCORERS[scorer](model.config), 0.5, **SHORT)]
    presses += [lambda: SCORERS[scorer](model.config)] if scorer != "knorm" else []
    for make_press in presses:
        found = []
        for _ in range(2):
            torch.manual_seed(0)  # of the gates
            press = make_press()
            cache = prefill(model, ids(), press, cache=make_cache(model.config))
            found.append(logits(model, cache))
            assert press.stats.sealed_layers == (0, 1, 2, 3) and press.memory_report().resident_share < 0.6
        assert torch.equal(*found) and (found[0] - dense).abs().max() > 0.1


@pytest.mark.parametrize("scorer", ["kvzip", "fastkvzip"])
def test_scores_are_those_of_the_weights_it_computes_with(quantised, scorer):
    """The replay runs through the quantised layers, and gates see their hidden states."""
    model, twin = quantised("llama", "weight_only")
    torch.manual_seed(0)
    source = SCORERS[scorer](model.config).source()
    source.prepare(model)
    scores = []
    for one in (model, twin.float()):
        found, cache = {}, DynamicCache()

        def keep(module, args, kwargs, output, found=found, cache=cache):
            found[module.layer_idx] = source.on_attention(module, kwargs, output, cache.layers[module.layer_idx])

        hooks = source.on_attention is not None
        handles = [x.self_attn.register_forward_hook(keep, with_kwargs=True) for x in one.model.layers if hooks]
        prefill(one, ids(), cache=cache)
        [handle.remove() for handle in handles]
        with torch.no_grad():
            scores.append(source.after_prefill(one, cache, ids(), None) or found)
    assert sorted(scores[0]) == sorted(scores[1]) == [0, 1, 2, 3]
    for i in range(4):
        torch.testing.assert_close(scores[0][i], scores[1][i], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("how", ["weight_only", "dynamic"])
def test_generate_gives_the_tokens_of_the_dense_cache(quantised, how, options):
    model, _ = quantised("llama", how)
    press = VerKVPress(SnapKVPress(window_size=4), 0.4, **EXACT)
    options = {"attention_mask": torch.ones_like(ids()), "max_new_tokens": 8, "min_new_tokens": 8, **options}
    torch.manual_seed(5)
    expected = model.generate(ids(), **options)
    torch.manual_seed(5)
    with press(model):
        assert torch.equal(model.generate(ids(), **options), expected)
    assert press.stats.sealed_layers == (0, 1, 2, 3) and press.stats.n_passes > 0
