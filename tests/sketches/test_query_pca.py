"""Query-weighted PCA of single heads: in which metric it is best, and that heads are coded on their own."""

import torch
from torch.testing import assert_close

from verkv.sketches import QueryPCASketch, TransformSketch


def squared_error(sketch, keys, rows):
    return float((sketch.logits(rows) - rows @ keys.mT).square().mean())


def test_directions_that_queries_use_are_coded_best():
    keys, direction = torch.randn(1, 2, 400, 16), torch.randn(16)
    rows = torch.randn(1, 2, 50, 1) * direction
    weighted, plain = QueryPCASketch().build(keys, rows), QueryPCASketch().build(keys)
    assert squared_error(weighted, keys, rows) < 0.05 * squared_error(plain, keys, rows)


def test_query_heads_belong_to_their_kv_head():
    """The queries of KV head 1 do not change KV head 0."""
    keys, queries, rows = torch.randn(1, 2, 200, 16), torch.randn(1, 6, 9, 16), torch.randn(1, 2, 3, 16)
    other = torch.cat([queries[:, :3], 5 * torch.randn(1, 3, 9, 16)], dim=1)
    logits = [QueryPCASketch().build(keys, q).logits(rows) for q in (queries, other)]
    assert torch.equal(logits[0][:, 0], logits[1][:, 0]) and not torch.equal(logits[0][:, 1], logits[1][:, 1])


def test_it_is_the_transform_of_a_single_head_as_cached():
    keys, queries, rows = torch.randn(2, 1, 200, 16), torch.randn(2, 3, 9, 16), torch.randn(2, 1, 4, 16)
    pca, transform = QueryPCASketch().build(keys, queries), TransformSketch(None).build(keys, queries)
    assert torch.equal(pca._planes[:, 0], transform._planes)
    assert_close(pca.logits(rows), transform.logits(rows), atol=1e-4, rtol=1e-4)
    assert_close(pca.decode(), transform.decode(), atol=1e-5, rtol=1e-5)


def test_positions_do_not_matter():
    keys, rows = torch.randn(1, 2, 60, 16), torch.randn(1, 2, 4, 16)
    shifted = QueryPCASketch().build(keys, positions=torch.arange(60)[None] + 9)
    assert torch.equal(shifted.logits(rows), QueryPCASketch().build(keys).logits(rows))
