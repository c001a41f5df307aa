"""The prompt's last queries: what sketches are fitted with, and tolerances calibrated on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from verkv.attention import observe_attention
from verkv.cache import layer_kinds
from verkv.checks import check_count

Queries = dict[int, Tensor]  # by layer, (B, Hq, M, d), float32: of the prompt's last M positions, times the scaling


class QueryRecorder:
    """Keeps the queries of the last positions of a forward pass, as attention sees them, times its scaling.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model: only full-attention layers are recorded.
    n_positions : int
        How many positions.
    """

    def __init__(self, config, n_positions: int):
        self.n_positions = check_count("n_positions", n_positions)
        self.layers = {i for i, kind in enumerate(layer_kinds(config)) if kind == "full_attention"}
        self.queries: Queries = {}
        self.n_tokens = 0

    def observe(self, module: nn.Module, query: Tensor, key: Tensor, scaling: float) -> None:
        """What ``observe_attention`` calls."""
        layer_idx = getattr(module, "layer_idx", None)
        if layer_idx in self.layers:
            self.n_tokens = key.shape[2]
            self.queries[layer_idx] = query[:, :, -self.n_positions :].detach().float() * scaling

    def of(self, cache) -> Queries | None:
        """The queries that belong to a cache; None where another press has pruned it, so that positions are lost."""
        return self.queries if cache.get_seq_length() == self.n_tokens else None

    def cut(self, n_positions: int) -> None:
        """Forget the last positions, which were taken out of the cache again."""
        if n_positions > 0:
            self.n_tokens -= n_positions
            for layer_idx, query in self.queries.items():
                self.queries[layer_idx] = query[:, :, : max(0, query.shape[2] - n_positions)]


@contextmanager
def record_queries(model, n_positions: int = 128) -> Iterator[Queries]:
    """Record the queries of a prompt's last positions while it is prefilled, for :meth:`VerKVPress.seal`.

    Parameters
    ----------
    model : PreTrainedModel
    n_positions : int >= 1
        How many positions.

    Yields
    ------
    dict of int to Tensor, shape (B, Hq, M, d), float32
        By layer, times the attention's scaling; filled by the last forward pass in the block.

    Examples
    --------
    >>> with record_queries(model) as queries:  # doctest: +SKIP
    ...     model.model(input_ids=context_ids, past_key_values=cache)
    >>> press.seal(model, cache, scores, queries=queries)  # doctest: +SKIP
    """
    recorder = QueryRecorder(model.config, check_count("n_positions", n_positions, least=1))
    with observe_attention(recorder.observe):
        yield recorder.queries


def without_padding(queries: Tensor, n_padding: Tensor, n_tokens: int) -> Tensor:
    """Queries (C, Hq, M, d) of the last M of ``n_tokens`` positions, 0 at padding, where they may be anything."""
    positions = torch.arange(n_tokens - queries.shape[2], n_tokens, device=queries.device)
    is_token = positions >= n_padding.to(queries.device)[:, None]
    return torch.where(is_token[:, None, :, None], queries, 0.0)
