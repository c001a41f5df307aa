"""Query-weighted PCA of each KV head's keys as they are cached: what the transform sketch is without undoing RoPE."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.sketches.component_code import decoding_factors, encode_features
from verkv.sketches.key_basis import KeyBasis, fit_key_basis
from verkv.sketches.prompt import check_bits_per_token, checked_keys, position_spans, token_bits


@dataclass(eq=False)
class QueryPCASketch:
    """Each KV head's keys in the principal directions of its own metric, quantised to few bits.

    The metric is the queries' second moment, so that components are ranked by what they contribute to logits. Scoring
    is cheap: the query is projected, and the codes are multiplied with it. Positions serve only to find the padding.

    Parameters
    ----------
    bits_per_token : int, optional
        For each KV head; the size of the 2-bit RoPE pair sketch by default (36 at head dim 64, 72 at 128).

    Examples
    --------
    >>> import torch
    >>> keys, query = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 3, 16)
    >>> sketch = QueryPCASketch(bits_per_token=24).build(keys)
    >>> bool(torch.allclose(sketch.logits(query), query @ sketch.decode().mT, atol=1e-4))
    True
    """

    bits_per_token: int | None = None

    name = "query_pca"
    is_oracle = False
    is_linear = True

    def __post_init__(self):
        check_bits_per_token(self.bits_per_token)

    def build(self, keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None) -> "QueryPCASketch":
        """Fit and encode each head's keys. Without queries all channels weigh the same.

        Raises
        ------
        ValueError
            If keys or queries are not finite, positions are not consecutive, or there are too many bits.
        """
        keys = checked_keys(keys)
        n_heads, head_dim = keys.shape[1], keys.shape[3]
        n_bits = token_bits(self.bits_per_token, head_dim)
        units = []
        for row, span in enumerate(position_spans(keys, positions)):
            for head in range(n_heads):
                head_queries = None if queries is None else queries[row].unflatten(0, (n_heads, -1))[head]
                basis = fit_key_basis(keys[row, head : head + 1, span.padding :], head_queries)
                units.append(_encode(keys[row, head], span.padding, basis, n_bits))
        built = dataclasses.replace(self)
        built._n_tokens = keys.shape[2]
        built._counts = [[unit.counts for unit in units[i : i + n_heads]] for i in range(0, len(units), n_heads)]
        built._planes = torch.stack([unit.planes for unit in units]).unflatten(0, (-1, n_heads))
        decoding = torch.nn.utils.rnn.pad_sequence([unit.decoding for unit in units], batch_first=True)
        built._decoding = decoding.unflatten(0, (-1, n_heads))  # (B, Hkv, 1 + C, d)
        return built

    def logits(self, query: Tensor) -> Tensor:
        """Project the query, multiply with the codes; (B, Hkv, R, d) -> (B, Hkv, R, T) in float32."""
        query = query.float()
        logits = query.new_empty(*query.shape[:3], self._n_tokens)
        for row, head, factors, decoding in self._units():
            torch.mm(query[row, head] @ decoding.mT, factors, out=logits[row, head])
        return logits

    def decode(self) -> Tensor:
        """The keys, (B, Hkv, T, d), float32."""
        keys = self._decoding.new_empty(*self._decoding.shape[:2], self._n_tokens, self._decoding.shape[-1])
        for row, head, factors, decoding in self._units():
            torch.mm(factors.mT, decoding, out=keys[row, head])
        return keys

    def charged_bytes(self, n_tokens: int, head_dim: int) -> int:
        """A byte for every bit of eight tokens."""
        return token_bits(self.bits_per_token, head_dim) * -(-n_tokens // 8)

    @property
    def nbytes(self) -> int:
        """The bit planes."""
        return self._planes.nbytes

    @property
    def uncharged_nbytes(self) -> int:
        """The decoding matrix of each head, whatever the length."""
        return self._decoding.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_codes": self._planes}

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_decoding": self._decoding}

    def select(self, indices: Tensor) -> "QueryPCASketch":
        """Reindex the batch."""
        chosen = dataclasses.replace(self)
        chosen._n_tokens = self._n_tokens
        chosen._counts = [self._counts[row] for row in indices.tolist()]
        indices = indices.to(self._planes.device)
        chosen._planes, chosen._decoding = self._planes[indices], self._decoding[indices]
        return chosen

    def _units(self):
        """(row, head, factors, decoding matrix) of each KV head."""
        for row, heads in enumerate(self._counts):
            for head, counts in enumerate(heads):
                factors = decoding_factors(self._planes[row, head], counts, self._n_tokens)
                yield row, head, factors, self._decoding[row, head, : len(factors)]


def _encode(keys: Tensor, padding: int, basis: KeyBasis, n_bits: int):
    analysis, synthesis = (matrix.to(keys.device) for matrix in basis.matrices())
    return encode_features(keys, padding, analysis, synthesis, n_bits)
