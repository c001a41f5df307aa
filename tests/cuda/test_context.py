"""A sealed context's attention by torch, and the same step by the kernels from the same tensors."""

import pytest
import torch
from agreement import needs_compiler
from problems import make_layer

from verkv.attention import weighted_attention
from verkv.context import SealedContext, SealPlan
from verkv.cuda.launch import DeviceLayer, attend, plan_rope_pair, rope_pair_tensors, unpack_bits
from verkv.kvfetch import FetchConfig
from verkv.sketches import RopePairSketch
from verkv.stats import FetchStats
from verkv.tiers import RESIDENT_BIT

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_emulator")]

BEAMS, GROUP, TAIL = 2, 3, 5


@pytest.mark.parametrize("n_queries", [1, 3], ids=["decode", "question"])
@pytest.mark.parametrize("paper", [False, True], ids=["blind", "paper"])
def test_kernels_take_the_step_of_a_sealed_context(paper, n_queries):
    layer = make_layer(600, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=3)
    contexts, heads, n_tokens, d = layer.keys.shape
    batch, scaling = contexts * BEAMS, layer.scaling
    query = 0.6 * torch.randn(batch, heads * GROUP, n_queries, d)
    tail_keys, tail_values = torch.randn(2, batch, heads, TAIL, d).bfloat16()
    fetch = FetchConfig(epsilon=0.2, shortlist=20, paper=paper)
    stats = FetchStats("test", sealed_layers=(0,), record_bounds=True)
    plan = SealPlan(layer.codes, torch.tensor([0, 150]), fetch=fetch, sketch=RopePairSketch(), beams=BEAMS)
    context = SealedContext(layer.keys, layer.values, plan, 0, stats)
    expected = context.attend(query, tail_keys, tail_values, None, scaling)

    rows = context._to_units(query)  # (N, beams, G * Tq, d)
    tail_k, tail_v = context._tail_to_units(tail_keys), context._tail_to_units(tail_values)
    tail_logits = rows @ tail_k.float().mT * scaling + context._tail_bias(None, query, TAIL)
    sealed = DeviceLayer(
        codes=context.codes,
        row_keys=context.rows.keys,
        row_values=context.rows.values,
        row_codes=context.rows.codes,
        row_positions=((context.codes & RESIDENT_BIT) != 0).nonzero()[:, 1].int(),
        row_offsets=context.rows.offsets,
        host_keys=context.host.keys,
        host_values=context.host.values,
    )
    flat, tail_lse = rows.flatten(1, 2).contiguous(), tail_logits.logsumexp(-1).flatten(1)
    sketch = rope_pair_tensors(context.sketch)
    decided = plan_rope_pair(sealed, sketch, flat, tail_lse, scaling, fetch.epsilon, fetch.delta, 20, paper=paper)
    output, lse = attend(sealed, decided, flat, scaling)

    # The tail joins by its share of the denominator.
    split = lambda tensor: tensor.unflatten(1, (BEAMS, -1))  # noqa: E731
    tail_output, _ = weighted_attention([(tail_logits, tail_v)])
    share = (split(lse) - torch.logaddexp(split(lse), split(tail_lse))).exp()[..., None]
    merged = context._from_units(share * split(output) + (1 - share) * tail_output, query)
    assert (merged - expected).norm() < 1e-5 * expected.norm()

    # And the statistics are what torch's path recorded.
    union, resident = unpack_bits(decided.promoted, n_tokens), (context.codes & RESIDENT_BIT) != 0
    assert stats.fetched() == int(decided.n_fetched.sum()) == int((union & ~resident).sum()) > 0
    assert stats.shortlisted() == int(decided.n_shortlisted.sum())
    assert stats.promoted() == pytest.approx(int(decided.n_promoted.sum()), abs=2)  # their logits differ by rounding
    fetching = context._spread(split(decided.n_row_fetched > 0), heads * GROUP, n_queries)
    assert stats.fetch_rate() == pytest.approx(float(fetching.float().mean()))
    bounds = context._spread(split(decided.error_bound), heads * GROUP, n_queries)
    torch.testing.assert_close(
        bounds.flatten().sort().values, stats.bounds().flatten().sort().values, rtol=1e-5, atol=1e-7
    )
