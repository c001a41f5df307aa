"""Quest's page sketch: channelwise minimum and maximum of every page of keys, which bound the page's logits."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.checks import check_count
from verkv.sketches.prompt import check_bits_per_token, checked_keys, position_spans, token_bits


@dataclass(eq=False)
class PageMinMaxSketch:
    """Score every token of a page by an upper bound of the page's logits [1]_.

    The bound of <k, q> over a page is the sum over the channels of max(min_c q_c, max_c q_c). Minima and maxima are
    stored in units of each channel's range over the context, rounded outward, so that the bound stays one (up to
    rounding in float32 when it is summed). It is no estimate of a token's own logit: tokens of a page score the same.

    Parameters
    ----------
    page_size : int, optional
        Tokens to a page. By default the smallest for which the sketch has at most ``bits_per_token``.
    bits_per_token : int, optional
        For each KV head, in place of ``page_size``; by default the size of the 2-bit RoPE pair sketch.
    precision : {8, 16}
        Bits of each minimum and maximum.

    References
    ----------
    .. [1] Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024.

    Examples
    --------
    >>> import torch
    >>> keys, query = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 3, 16)
    >>> sketch = PageMinMaxSketch(page_size=10).build(keys)
    >>> bool((sketch.logits(query) >= query @ keys.mT - 1e-4).all())
    True
    """

    page_size: int | None = None
    bits_per_token: int | None = None
    precision: int = 8

    name = "page_minmax"
    is_oracle = False
    is_linear = False

    def __post_init__(self):
        check_bits_per_token(self.bits_per_token)
        if self.page_size is not None:
            check_count("page_size", self.page_size, least=1)
            if self.bits_per_token is not None:
                raise ValueError("page_size and bits_per_token say the same: give one of them")
        if self.precision not in (8, 16):
            raise ValueError(f"precision must be 8 or 16, got {self.precision!r}")

    def build(self, keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None) -> "PageMinMaxSketch":
        """Find and quantise each page's extremes. Queries are not used; positions serve only to find the padding.

        Raises
        ------
        ValueError
            If keys are not finite, or positions are not consecutive.
        """
        keys = checked_keys(keys)
        n_tokens, head_dim = keys.shape[2:]
        page_size = self._page_size(head_dim)
        built = dataclasses.replace(self)
        built._n_tokens, built._paddings = n_tokens, [span.padding for span in position_spans(keys, positions)]
        page = built._pages(head_dim, keys.device)[:, None, :, None].expand_as(keys)
        shape = (*keys.shape[:2], -(-n_tokens // page_size), head_dim)
        minima = keys.new_full(shape, torch.inf).scatter_reduce(2, page, keys, "amin")
        maxima = keys.new_full(shape, -torch.inf).scatter_reduce(2, page, keys, "amax")
        low, high = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
        built._range = torch.stack([low, high])  # (2, B, Hkv, 1, d)
        step = built._step()
        # Both count from the outer end, so that code 0 is exact. Pages that no token is in have infinite extremes.
        codes = [self._outward(minima, low, step), self._outward(-maxima, -high, step)]
        built._codes = torch.stack(codes)  # (2, B, Hkv, n_pages, d)
        return built

    def logits(self, query: Tensor) -> Tensor:
        """Upper bounds of <k, q>; (B, Hkv, R, d) -> (B, Hkv, R, T) in float32."""
        minima, maxima = self.bounds()
        query = query.float()
        pages = query.clamp_min(0) @ maxima.mT + query.clamp_max(0) @ minima.mT  # (B, Hkv, R, n_pages)
        page = self._pages(query.shape[-1], pages.device)
        return pages.gather(-1, page[:, None, None].expand(-1, *pages.shape[1:3], -1))

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Channelwise lower and upper bounds of each page's keys, (B, Hkv, n_pages, d) each, float32."""
        low, high = self._range
        codes = self._codes.float()
        if self.precision == 16:
            codes = codes + 2**15
        step = self._step()
        return low + codes[0] * step, high - codes[1] * step

    def decode(self) -> Tensor:
        """Not possible: a page's bound is no linear function of the query."""
        raise NotImplementedError("a page sketch bounds logits and has no keys to decode")

    def charged_bytes(self, n_tokens: int, head_dim: int) -> int:
        """Two numbers a channel for every begun page."""
        return -(-n_tokens // self._page_size(head_dim)) * 2 * head_dim * self.precision // 8

    @property
    def nbytes(self) -> int:
        """The pages' codes."""
        return self._codes.nbytes

    @property
    def uncharged_nbytes(self) -> int:
        """Each channel's range over the context, whatever the length."""
        return self._range.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_codes": self._codes}

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_range": self._range}

    def select(self, indices: Tensor) -> "PageMinMaxSketch":
        """Reindex the batch."""
        chosen = dataclasses.replace(self)
        chosen._n_tokens, chosen._paddings = self._n_tokens, [self._paddings[row] for row in indices.tolist()]
        indices = indices.to(self._codes.device)
        chosen._range, chosen._codes = self._range[:, indices], self._codes[:, indices]
        return chosen

    def _page_size(self, head_dim: int) -> int:
        if self.page_size is not None:
            return self.page_size
        n_bits = token_bits(self.bits_per_token, head_dim, most_per_channel=2 * self.precision)
        return -(-2 * head_dim * self.precision // n_bits)

    def _pages(self, head_dim: int, device: torch.device) -> Tensor:
        """Page of every token, (B, T). Pages start at the first token; copies of it before it are in the first page."""
        tokens = torch.arange(self._n_tokens, device=device) - torch.tensor(self._paddings, device=device)[:, None]
        return tokens.clamp_min(0) // self._page_size(head_dim)

    def _step(self) -> Tensor:
        low, high = self._range
        return (high - low) / (2**self.precision - 1)

    def _outward(self, extreme: Tensor, end: Tensor, step: Tensor) -> Tensor:
        """The largest codes, or one less, whose level end + code * step, as :meth:`bounds` rounds it, is not above."""
        most = 2**self.precision - 1
        codes = ((extreme - end) / torch.where(step > 0, step, 1.0)).floor().clamp(0, most)
        # Rounding can put a level just above the extreme. A step is far more than that: one code less is enough.
        codes = torch.where(end + codes * step > extreme, codes - 1, codes).clamp_min(0)
        return codes.to(torch.uint8) if self.precision == 8 else (codes - 2**15).to(torch.int16)
