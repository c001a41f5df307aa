"""The transform sketch: kvtc's transform coding of keys, used to score them (RoPE undone, joint PCA, water-filling)."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.rotary import Rotary
from verkv.sketches.component_code import EncodedFeatures, decoding_factors, encode_features
from verkv.sketches.key_basis import KeyBasis, fit_key_basis
from verkv.sketches.prompt import Span, check_bits_per_token, checked_keys, position_spans, token_bits

CHUNK_BYTES = 2**26  # of keys that are decoded at a time
FINE = 64  # positions whose phases are computed; the others' are products of two


@dataclass(eq=False)
class TransformSketch:
    """Keys with RoPE undone, transformed jointly over a layer's KV heads, and quantised to few bits.

    Undoing RoPE lets few components carry the keys. Their PCA is taken in the metric of the logits' expected squared
    error, which the queries give, and the bits are distributed by reverse water-filling as in [1]_. A token is scored
    by decoding its key, rotating it to its position and multiplying with the query.

    Charged are the codes, ``bits_per_token`` for each KV head; not charged, because independent of the context's
    length, are the decoding matrix (components x channels) and RoPE's frequencies.

    Parameters
    ----------
    rotary : Rotary or None
        The model's RoPE, see :func:`verkv.rotary.rotary_from_config`. None takes keys as they are cached.
    bits_per_token : int, optional
        For each KV head; the size of the 2-bit RoPE pair sketch by default (36 at head dim 64, 72 at 128).
    basis : KeyBasis, optional
        A basis fitted before, on other contexts of the same layer. By default it is fitted on the prompt.

    References
    ----------
    .. [1] Staniszewski and Łańcucki, "KV Cache Transform Coding for Compact Storage in LLM Inference",
       arXiv:2511.01815.

    Examples
    --------
    >>> import torch
    >>> sketch = TransformSketch(None).build(torch.randn(1, 8, 256, 128))
    >>> round(100 * sketch.nbytes / (8 * 256 * 128 * 2 * 2), 2)  # per cent of a bf16 cache
    1.76
    """

    rotary: Rotary | None
    bits_per_token: int | None = None
    basis: KeyBasis | None = None

    name = "transform"
    is_oracle = False
    is_linear = True

    def __post_init__(self):
        check_bits_per_token(self.bits_per_token)

    def build(self, keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None) -> "TransformSketch":
        """Fit basis, bits and ranges of each row to its keys and queries, and encode the keys.

        Without queries all channels weigh the same. Padding does not take part in the fit.

        Raises
        ------
        ValueError
            If keys or queries are not finite, positions are not consecutive, or shapes do not fit the options.
        """
        keys = checked_keys(keys)
        spans = position_spans(keys, positions)
        n_kv_heads, _, head_dim = keys.shape[1:]
        if self.rotary is not None and self.rotary.rotary_dim > head_dim:
            raise ValueError(
                f"rotary has {self.rotary.rotary_dim} channels, more than the keys' head dim of {head_dim}"
            )
        n_bits = n_kv_heads * token_bits(self.bits_per_token, head_dim)
        rows = [
            self._encode(keys[row], None if queries is None else queries[row], span, n_bits)
            for row, span in enumerate(spans)
        ]
        rotary = None if self.rotary is None else self.rotary.to(keys.device)
        built = dataclasses.replace(self, rotary=rotary)
        built._n_tokens, built._spans = keys.shape[2], spans
        built._counts = [row.counts for row in rows]
        built._planes = torch.stack([row.planes for row in rows])
        decoding = torch.nn.utils.rnn.pad_sequence([row.decoding for row in rows], batch_first=True)
        decoding = decoding.unflatten(-1, (n_kv_heads, head_dim)).transpose(1, 2)  # (B, Hkv, 1 + C, d)
        built._decoding = self._side_by_side(decoding).contiguous()
        return built

    def logits(self, query: Tensor) -> Tensor:
        """Decode, rotate, multiply; (B, Hkv, R, d) -> (B, Hkv, R, T) in float32."""
        query = self._side_by_side(query.float())
        rows = [torch.cat([query[row] @ keys.mT for keys in self._decoded(row)], dim=-1) for row in range(len(query))]
        return torch.stack(rows)

    def decode(self) -> Tensor:
        """The keys, (B, Hkv, T, d), float32, RoPE applied."""
        rows = [torch.cat(list(self._decoded(row)), dim=1) for row in range(len(self._planes))]
        return self._as_cached(torch.stack(rows))

    def charged_bytes(self, n_tokens: int, head_dim: int) -> int:
        """A byte for every bit of eight tokens."""
        return token_bits(self.bits_per_token, head_dim) * -(-n_tokens // 8)

    @property
    def nbytes(self) -> int:
        """The bit planes."""
        return self._planes.nbytes

    @property
    def uncharged_nbytes(self) -> int:
        """The decoding matrix of each row and RoPE's frequencies, whatever the length."""
        return sum(tensor.nbytes for tensor in self.uncharged_tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_codes": self._planes}

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        shared = {} if self.rotary is None else {"sketch_inv_freq": self.rotary.inv_freq}
        return {"sketch_decoding": self._decoding} | shared

    def select(self, indices: Tensor) -> "TransformSketch":
        """Reindex the batch."""
        chosen = dataclasses.replace(self)
        chosen._n_tokens = self._n_tokens
        rows = indices.tolist()
        chosen._spans, chosen._counts = [self._spans[row] for row in rows], [self._counts[row] for row in rows]
        indices = indices.to(self._planes.device)
        chosen._planes, chosen._decoding = self._planes[indices], self._decoding[indices]
        return chosen

    def _encode(self, keys: Tensor, queries: Tensor | None, span: Span, n_bits: int) -> EncodedFeatures:
        """One row's keys (Hkv, T, d): its KV heads' channels, RoPE undone, are the features of a token."""
        if self.rotary is not None:
            keys = self.rotary.undo(keys, span.positions(keys.shape[1], keys.device))
        basis = self.basis
        if basis is None:
            basis = fit_key_basis(keys[:, span.padding :], queries, self.rotary, span.first)
        elif basis.weights.shape[:2] != (keys.shape[0], keys.shape[2]):
            raise ValueError(f"basis is for {basis.weights.shape[0]} KV heads of {basis.weights.shape[1]} channels")
        analysis, synthesis = (matrix.to(keys.device) for matrix in basis.matrices())
        return encode_features(keys.transpose(0, 1).flatten(1), span.padding, analysis, synthesis, n_bits)

    def _decoded(self, row: int):
        """Keys of a row, RoPE applied, pairs side by side: (Hkv, t, d) for consecutive chunks of tokens."""
        n_kv_heads, _, head_dim = self._decoding.shape[1:]
        n_components = self._counts[row][0]
        decoding = self._decoding[row, :, : 1 + n_components]
        chunk = max(FINE, CHUNK_BYTES // (4 * n_kv_heads * head_dim) // FINE * FINE)
        for start in range(0, self._n_tokens, chunk):
            stop = min(start + chunk, self._n_tokens)
            planes = self._planes[row, :, start // 8 : -(-stop // 8)]
            keys = torch.matmul(decoding_factors(planes, self._counts[row], stop - start).mT, decoding)
            if self.rotary is not None:
                pairs = keys[..., : self.rotary.rotary_dim].unflatten(-1, (-1, 2))
                torch.view_as_complex(pairs).mul_(self._phases(row, start, stop))
            yield keys

    def _phases(self, row: int, start: int, stop: int) -> Tensor:
        """exp(i position inv_freq) of tokens start .. stop - 1, (t, rotary_dim / 2), complex64.

        Products of a coarse and a fine phase, with angles in float32 as in the model: two small tables in place of a
        sine and a cosine for each token and pair, which would have to be kept, and charged, or computed at every step.
        """
        span, device = self._spans[row], self._planes.device
        frequency = self.rotary.inv_freq
        n_coarse = -(-(stop - start) // FINE)
        coarse = start - span.padding + span.first + FINE * torch.arange(n_coarse, device=device)
        fine = torch.arange(FINE, device=device)
        angles = torch.cat([coarse, fine])[:, None] * frequency
        phases = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        phases = (phases[:n_coarse, None] * phases[n_coarse:]).flatten(0, 1)[: stop - start]
        if start < span.padding:
            phases[: span.padding - start] = torch.polar(torch.ones_like(frequency), span.first * frequency).to(phases)
        return phases

    def _side_by_side(self, channels: Tensor) -> Tensor:
        """Channels (..., d) with the members of every rotated pair next to each other, as parts of a complex number."""
        if self.rotary is None:
            return channels
        pairs, rest = channels.tensor_split([self.rotary.rotary_dim], dim=-1)
        return torch.cat([pairs.unflatten(-1, (2, -1)).mT.flatten(-2), rest], dim=-1)

    def _as_cached(self, channels: Tensor) -> Tensor:
        """The inverse of :meth:`_side_by_side`."""
        if self.rotary is None:
            return channels
        pairs, rest = channels.tensor_split([self.rotary.rotary_dim], dim=-1)
        return torch.cat([pairs.unflatten(-1, (-1, 2)).mT.flatten(-2), rest], dim=-1)
