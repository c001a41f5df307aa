"""Keys, scores and dtypes on which a sketch or a covariance degenerates: no NaN, and no certificate that is not one."""

import pytest
import torch
from kvpress import KnormPress
from transformers import DynamicCache, LlamaConfig

from verkv import VerKVPress
from verkv.estimators.compiled_plan import compiles

HEADS, KV_HEADS, T, D = 4, 2, 300, 64


class StandIn:
    """What :meth:`seal` needs to know of a model."""

    config = LlamaConfig(
        hidden_size=HEADS * D, head_dim=D, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_hidden_layers=1
    )


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KEYS = {
    "ordinary": lambda: draw(1, KV_HEADS, T, D),
    "constant": lambda: draw(1, KV_HEADS, 1, D).expand(1, KV_HEADS, T, D).contiguous(),
    "zero": lambda: torch.zeros(1, KV_HEADS, T, D),
    "one direction": lambda: draw(1, KV_HEADS, T, 1) * draw(1, KV_HEADS, 1, D, seed=1),
    "outlier channels": lambda: draw(1, KV_HEADS, T, D) * torch.where(torch.arange(D) % 16 == 0, 100.0, 1.0),
    "outlier tokens": lambda: draw(1, KV_HEADS, T, D) * torch.where(torch.arange(T) % 50 == 7, 30.0, 1.0)[:, None],
}
OPTIONS = {
    "default": {},
    "moments": {"error_aware": True, "key_rounds": 1},
    "output": {"target": "output"},
    "calibrated": {"calibrate": "layer"},
    "calibrated output": {"calibrate": "head", "target": "output", "epsilon": 0.3},
    "query_pca": {"sketch": "query_pca"},
    "page_minmax": {"sketch": "page_minmax"},
    "product_quantization": {"sketch": "product_quantization"},
    # One covariance for all tokens of a head cannot speak of a few that are coded far worse: those must be outliers.
    "rope_pair": {"sketch": "rope_pair", "error_aware": True, "outliers": 0.03},
}


def sealed(keys, scores=None, dtype=torch.float32, queries=None, **options):
    """A press, its cache, and the values."""
    values, cache = draw(1, KV_HEADS, T, D, seed=2), DynamicCache()
    cache.update(keys.to(dtype), values.to(dtype), 0)
    scores = draw(1, KV_HEADS, T, seed=3).abs().clamp_max(1.0) if scores is None else scores
    press = VerKVPress(KnormPress(), 0.6, n_sink=4, n_local=8, audit=True, **options)
    queries = 0.125 * draw(1, HEADS, 128, D, seed=4) if queries is None else queries
    press.seal(StandIn, cache, {0: scores}, queries={0: queries})
    return press, cache


def decode(press, cache, scale=1.0, n_steps=4):
    """Outputs of some decode steps, and their records."""
    context, outputs = cache.layers[0].context, []
    for step in range(n_steps):
        query = scale * draw(1, HEADS, 1, D, seed=10 + step)
        tail = (draw(1, KV_HEADS, 1, D, seed=20).to(context.dtype), draw(1, KV_HEADS, 1, D, seed=21).to(context.dtype))
        outputs.append(context.attend(query.to(context.dtype), *tail, None, D**-0.5))
    return torch.cat(outputs, 2), press.stats.records()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("keys", KEYS)
def test_no_nan_and_errors_within_the_tolerance(keys, options):
    press, cache = sealed(KEYS[keys](), **OPTIONS[options])
    outputs, _ = decode(press, cache)
    assert torch.isfinite(outputs).all()
    assert torch.isfinite(press.stats.relative_errors()).all() and torch.isfinite(press.stats.output_errors()).all()
    if options not in ("page_minmax", "calibrated"):  # a bound in place of an estimate; a tolerance of its own
        epsilon = 0.3 if options == "calibrated output" else 0.05
        errors = press.stats.output_errors() if "output" in options else press.stats.relative_errors()
        # 16 decisions: more than two misses of a tolerance that one in ten may miss are rarer than 1 in 4.
        assert (errors > max(epsilon, 0.05)).sum() <= (16 if options == "output" else 2)


@pytest.mark.parametrize("keys", ["outlier channels", "outlier tokens"])
def test_a_sketch_that_cannot_code_the_keys_reads_everything_and_says_so(keys, each_way):
    """Its moments leave no bound to stand on: the step is exact, and counted as such."""
    press, cache = sealed(10.0 * KEYS[keys](), sketch="rope_pair", error_aware=True)
    _, records = decode(press, cache)
    exact = sum(record.exact_heads for record in records)
    assert exact > 0 and press.stats.exact_rate("decode") == exact / (4 * KV_HEADS)
    # By loops, what is exact is off by the rounding of logits, of which the largest is at most |q| |k| / sqrt(d): they
    # need not round as the audit's own matrix product does.
    keys, query = cache.layers[0].context.host.keys.norm(dim=-1), draw(1, HEADS, 1, D, seed=10).norm(dim=-1)
    rounding = 4.0 * torch.finfo(torch.float32).eps * float(keys.max() * query.max()) * D**-0.5
    limit = rounding if compiles() else 1e-4
    assert press.stats.relative_errors().max() < limit < 0.01 or exact < 4 * KV_HEADS
    assert press.stats.summary()["decode_exact_rate"] > 0


@pytest.mark.parametrize("scores", [torch.full((1, KV_HEADS, T), 0.5), torch.zeros(1, KV_HEADS, T)])
@pytest.mark.parametrize("options", ["default", "output", "calibrated"])
def test_equal_scores(scores, options):
    press, cache = sealed(KEYS["ordinary"](), scores=scores, **OPTIONS[options])
    outputs, _ = decode(press, cache)
    assert torch.isfinite(outputs).all()
    assert abs(press.memory_report().resident_share - 0.4) < 0.1


@pytest.mark.parametrize("options", ["default", "output", "moments"])
def test_half_precision_at_its_limits(options):
    """fp16 keys of 6e4 and queries that make logits of 1e6: weights under- and overflow, sums do not."""
    keys = (3e4 * KEYS["ordinary"]()).clamp(-6e4, 6e4)
    press, cache = sealed(keys, dtype=torch.float16, **OPTIONS[options])
    outputs, _ = decode(press, cache, scale=3.0)
    assert outputs.dtype == torch.float16 and torch.isfinite(outputs).all()
    assert torch.isfinite(press.stats.relative_errors()).all()


def test_queries_that_are_all_zero():
    press, cache = sealed(KEYS["ordinary"](), queries=torch.zeros(1, HEADS, 128, D), calibrate="layer")
    outputs, _ = decode(press, cache)
    assert torch.isfinite(outputs).all() and torch.isfinite(cache.layers[0].context.tolerances).all()


def test_a_nan_among_the_keys_is_refused_before_sealing():
    keys = KEYS["ordinary"]()
    keys[0, 0, 100, 3] = torch.nan
    with pytest.raises(ValueError, match="keys hold NaN"):
        sealed(keys)
