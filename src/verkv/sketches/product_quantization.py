"""PQCache's sketch: product quantisation of each KV head's keys, with codebooks fitted on the prompt."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.checks import check_count
from verkv.sketches.component_code import FIT_TOKENS, MAX_BITS, pack_planes, plane_counts, unpack_planes
from verkv.sketches.prompt import check_bits_per_token, checked_keys, position_spans, token_bits


@dataclass(eq=False)
class ProductQuantizationSketch:
    """Split each key into sub-vectors and replace each by its nearest centroid [1]_.

    Neighbouring channels form a sub-vector; there are as few of them as codes of at most a byte allow. Centroids come
    from k-means on the keys as they are cached. A query is multiplied with all centroids, and a token's score is the
    sum of the products that its codes name. The codebooks do not depend on the context's length and are not charged,
    but they are large: at 4,000 tokens larger than the codes.

    Parameters
    ----------
    bits_per_token : int, optional
        For each KV head; the size of the 2-bit RoPE pair sketch by default (36 at head dim 64, 72 at 128).
    rounds : int
        Iterations of k-means.
    seed : int
        Of the tokens that the centroids start from.

    References
    ----------
    .. [1] Zhang et al., "PQCache: Product Quantization-based KVCache for Long Context LLM Inference",
       arXiv:2407.12820.

    Examples
    --------
    >>> import torch
    >>> keys, query = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 3, 16)
    >>> sketch = ProductQuantizationSketch(bits_per_token=24).build(keys)
    >>> bool(torch.allclose(sketch.logits(query), query @ sketch.decode().mT, atol=1e-4))
    True
    """

    bits_per_token: int | None = None
    rounds: int = 8
    seed: int = 0

    name = "product_quantization"
    is_oracle = False
    is_linear = True

    def __post_init__(self):
        check_bits_per_token(self.bits_per_token)
        check_count("rounds", self.rounds)

    def build(
        self, keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None
    ) -> "ProductQuantizationSketch":
        """Fit codebooks and encode the keys. Queries are not used; positions serve only to find the padding.

        Raises
        ------
        ValueError
            If keys are not finite, positions are not consecutive, or there are too many bits.
        """
        keys = checked_keys(keys)
        bits = self._split_bits(keys.shape[-1])
        planes, codebooks = [], []
        for row, span in enumerate(position_spans(keys, positions)):
            for head in keys[row]:
                parts = head.tensor_split(len(bits), dim=-1)
                books = [
                    self._centroids(part[span.padding :], 2**n) for part, n in zip(parts, bits.tolist(), strict=True)
                ]
                codes = torch.stack([_nearest(part, book) for part, book in zip(parts, books, strict=True)])
                planes.append(pack_planes(codes.to(torch.uint8), bits))
                codebooks.append(torch.cat([book.flatten() for book in books]))
        built = dataclasses.replace(self)
        built._n_tokens, built._head_dim = keys.shape[2:]
        built._planes = torch.stack(planes).unflatten(0, keys.shape[:2])
        built._codebooks = torch.stack(codebooks).unflatten(0, keys.shape[:2])
        return built

    def logits(self, query: Tensor) -> Tensor:
        """Add up the products with the centroids; (B, Hkv, R, d) -> (B, Hkv, R, T) in float32."""
        query = query.float()
        logits = query.new_zeros(*query.shape[:3], self._n_tokens)
        for row, head, codes, books in self._units():
            parts = query[row, head].tensor_split(len(books), dim=-1)
            for part, code, book in zip(parts, codes, books, strict=True):
                logits[row, head] += (part @ book.mT).index_select(1, code)
        return logits

    def decode(self) -> Tensor:
        """The keys, (B, Hkv, T, d), float32: each sub-vector's centroid."""
        keys = self._codebooks.new_empty(*self._planes.shape[:2], self._n_tokens, self._head_dim)
        for row, head, codes, books in self._units():
            keys[row, head] = torch.cat([book[code] for code, book in zip(codes, books, strict=True)], dim=-1)
        return keys

    def charged_bytes(self, n_tokens: int, head_dim: int) -> int:
        """A byte for every bit of eight tokens."""
        return token_bits(self.bits_per_token, head_dim) * -(-n_tokens // 8)

    @property
    def nbytes(self) -> int:
        """The packed codes."""
        return self._planes.nbytes

    @property
    def uncharged_nbytes(self) -> int:
        """The codebooks, whatever the length."""
        return self._codebooks.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_codes": self._planes}

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_codebooks": self._codebooks}

    def select(self, indices: Tensor) -> "ProductQuantizationSketch":
        """Reindex the batch."""
        chosen = dataclasses.replace(self)
        chosen._n_tokens, chosen._head_dim = self._n_tokens, self._head_dim
        indices = indices.to(self._planes.device)
        chosen._planes, chosen._codebooks = self._planes[indices], self._codebooks[indices]
        return chosen

    def _split_bits(self, head_dim: int) -> Tensor:
        """Bits of each sub-vector's code, at most a byte, as even as possible, not increasing."""
        n_bits = token_bits(self.bits_per_token, head_dim)
        n_parts = -(-n_bits // MAX_BITS)
        return n_bits // n_parts + (torch.arange(n_parts, device="cpu") < n_bits % n_parts).long()

    def _centroids(self, points: Tensor, n_centroids: int) -> Tensor:
        """Lloyd's iteration from randomly chosen points; a centroid that loses all its points stays where it is."""
        points = points[:: -(-len(points) // FIT_TOKENS)]
        generator = torch.Generator().manual_seed(self.seed)
        start = torch.randperm(len(points), generator=generator).repeat(-(-n_centroids // len(points)))[:n_centroids]
        centroids = points[start.to(points.device)]
        for _ in range(self.rounds):
            nearest = _nearest(points, centroids)
            sums = torch.zeros_like(centroids).index_add(0, nearest, points)
            counts = torch.bincount(nearest, minlength=n_centroids)[:, None]
            centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
        return centroids

    def _units(self):
        """(row, head, codes (n_parts, T), codebooks) of each KV head."""
        bits = self._split_bits(self._head_dim)
        channels = torch.arange(self._head_dim, device="cpu").tensor_split(len(bits))
        widths = [len(part) for part in channels]
        sizes = [2**n * width for n, width in zip(bits.tolist(), widths, strict=True)]
        for row in range(self._planes.shape[0]):
            for head in range(self._planes.shape[1]):
                codes = unpack_planes(self._planes[row, head], plane_counts(bits))[:, : self._n_tokens].int()
                books = self._codebooks[row, head].split(sizes)
                yield row, head, codes, [book.view(-1, width) for book, width in zip(books, widths, strict=True)]


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Index of the nearest centroid of each point (T, d) -> (T,)."""
    # |p - c|^2 without |p|^2, about the centroids' mean, which keeps precision where all points are far from 0.
    centre = centroids.mean(0)
    points, centroids = points - centre, centroids - centre
    return torch.addmm(centroids.square().sum(1), points, centroids.mT, alpha=-2.0).argmin(1)
