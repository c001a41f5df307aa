"""A sealed layer's host copy as coded rows, in the place of :class:`verkv.tiers.HostTier` where memory is short.

Needs a calibration with ``layers_per_group=1``, so that a row of one layer can be read alone, and the layout `fetch`.
What is fetched are restored rows: guarantees about errors then refer to the restored cache, not to the model's own, and
``tier_error`` says how far apart the two are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.codecs.errors import CodecError
from verkv.codecs.kvtc import KVTC
from verkv.codecs.layout import SIDES
from verkv.codecs.transform import SideCodec, Stages, find_outliers


@dataclass(frozen=True)
class CodedSide:
    """Keys or values of all contexts: coded rows (n, row bytes) uint8, and rows (m, Hkv, d) kept as they are."""

    rows: Tensor
    exact: Tensor


class CompressedHostTier:
    """Keys and values of one layer in host memory as coded rows, decoded when they are read.

    Parameters
    ----------
    codec : KVTC
        With one layer per group and ``layout="fetch"``.
    layer : int
    sides : dict of str to CodedSide
    index : Tensor, shape (C, T), int64
        Number of a token's coded row, or -1 - number of its exact row.
    n_padding : Tensor, shape (C,), int64
    dtype : torch.dtype
    tier_error : dict
        Relative Frobenius error of the restored keys and values over all tokens: "key_error", "value_error".

    Examples
    --------
    >>> tier = CompressedHostTier.encode(codec, 3, keys, values)  # doctest: +SKIP
    >>> tier.read_keys(units, positions, keys.device)  # doctest: +SKIP
    """

    is_coded = True

    def __init__(
        self,
        codec: KVTC,
        layer: int,
        sides: dict[str, CodedSide],
        index: Tensor,
        n_padding: Tensor,
        dtype: torch.dtype,
        tier_error: dict[str, float],
    ):
        self.codec, self.layer, self._sides, self._index = codec, layer, sides, index
        self._n_padding, self._dtype, self.tier_error = n_padding, dtype, tier_error
        self._group = codec.layout.group_of(layer)
        self._bases: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    @torch.no_grad()
    def encode(
        cls, codec: KVTC, layer: int, keys: Tensor, values: Tensor, n_padding: Tensor | None = None
    ) -> "CompressedHostTier":
        """Code a layer's full keys and values.

        Parameters
        ----------
        codec : KVTC
        layer : int
        keys, values : Tensor, shape (C, Hkv, T, d)
            Keys with RoPE applied.
        n_padding : Tensor, shape (C,), int64, optional
            Left padding of each context; of a later segment minus the tokens before it, so that positions go on.

        Returns
        -------
        CompressedHostTier

        Raises
        ------
        CodecError
            If the codec shares a basis between layers, has another layout, or the states are not finite.
        """
        check_host_codec(codec)
        n_contexts, _, n_tokens, _ = keys.shape
        padding = torch.zeros(n_contexts, dtype=torch.int64) if n_padding is None else n_padding.cpu()
        states = {"k": keys, "v": values}
        rows: dict[str, list[Tensor]] = {side: [] for side in SIDES}
        exact: dict[str, list[Tensor]] = {side: [] for side in SIDES}
        index = torch.empty(n_contexts, n_tokens, dtype=torch.int64)
        n_rows = n_exact = 0
        for context in range(n_contexts):
            coded, is_exact = _encode_context(
                codec, layer, {s: t[context] for s, t in states.items()}, padding[context]
            )
            for side in SIDES:
                rows[side].append(coded[side])
                exact[side].append(states[side][context][:, is_exact.to(keys.device)].transpose(0, 1).cpu())
            index[context, ~is_exact] = n_rows + torch.arange(int((~is_exact).sum()))
            index[context, is_exact] = -1 - n_exact - torch.arange(int(is_exact.sum()))
            n_rows, n_exact = n_rows + int((~is_exact).sum()), n_exact + int(is_exact.sum())
        sides = {side: CodedSide(torch.cat(rows[side]), torch.cat(exact[side])) for side in SIDES}
        tier = cls(codec, layer, sides, index, padding, keys.dtype, {})
        for name, side in (("key_error", "k"), ("value_error", "v")):
            difference = (tier._decode_all(side) - states[side].cpu()).double().norm()
            tier.tier_error[name] = float(difference / states[side].double().norm().cpu().clamp_min(1e-30))
        return tier

    # --- what a host tier offers ------------------------------------------------------------------------------------

    def read_keys(self, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        """Key rows (M, d) of M (unit, position) pairs: coded rows are moved to the device and decoded there."""
        return self._read("k", units, positions, device)

    def read_values(self, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        """Value rows (M, d) of M (unit, position) pairs."""
        return self._read("v", units, positions, device)

    @property
    def key_row_bytes(self) -> int:
        """Bytes moved for one key row: the coded row of all the layer's heads."""
        return self._coder("k").coder.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes moved for one key and one value row."""
        return self.key_row_bytes + self._coder("v").coder.row_bytes

    @property
    def keys(self) -> Tensor:
        """All keys, decoded, (C, Hkv, T, d): as large as without a codec, so for unsealing and audits only."""
        return self._decode_all("k")

    @property
    def values(self) -> Tensor:
        """All values, decoded, (C, Hkv, T, d)."""
        return self._decode_all("v")

    def nbytes(self, side: str) -> int:
        """Host bytes of side "k" or "v"; the index counts for the keys."""
        held = self._sides[side].rows.nbytes + self._sides[side].exact.nbytes
        return held + (self._index.nbytes if side == "k" else 0)

    def select(self, indices: Tensor) -> "CompressedHostTier":
        """Reindex the batch. Coded rows are shared with this tier."""
        indices = indices.to("cpu")
        chosen = self._index[indices], self._n_padding[indices], self._dtype, self.tier_error
        return CompressedHostTier(self.codec, self.layer, self._sides, *chosen)

    def __deepcopy__(self, memo: dict) -> "CompressedHostTier":
        """Nothing of it is ever written, so a copy is the same object."""
        return self

    # --- internals --------------------------------------------------------------------------------------------------

    def _coder(self, side: str) -> SideCodec:
        return self.codec.sides[self._group, side]

    def _basis(self, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Basis (p, width) and mean (p,) of the layer on a device, read once."""
        key = side, device
        if key not in self._bases:
            self._bases[key] = self._coder(side).basis_and_mean(device)
        return self._bases[key]

    def _read(self, side: str, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        units, positions = units.to("cpu"), positions.to("cpu")
        part = self._coder(side).slices[0]
        slots = self._index[units // part.n_heads, positions]
        heads, is_coded = units % part.n_heads, slots >= 0
        out = torch.empty(len(units), part.dim, dtype=self._dtype, device=device)
        exact = self._sides[side].exact[-1 - slots[~is_coded], heads[~is_coded]]
        out[(~is_coded).to(device)] = exact.to(device)
        turned = (positions - self._n_padding[units // part.n_heads]).clamp_min(0)
        coded = self._decode(side, slots[is_coded], heads[is_coded], turned[is_coded], torch.device(device))
        out[is_coded.to(device)] = coded.to(self._dtype)
        return out

    def _decode(self, side: str, slots: Tensor, heads: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        """Rows (m, d), float32, of coded slots and heads."""
        codec, part = self._coder(side), self._coder(side).slices[0]
        basis, mean = self._basis(side, device)
        coordinates = codec.coder.dequantise(codec.coder.read_rows(self._sides[side].rows[slots].to(device)))
        states = torch.empty(len(slots), part.dim, device=device)
        for head in heads.unique().tolist():
            chosen, rows = (heads == head).to(device), part.head_rows(head)
            states[chosen] = torch.addmm(mean[rows], coordinates[chosen], basis[rows].T)
        return self.codec.rotary.apply(states, positions) if side == "k" else states

    def _decode_all(self, side: str) -> Tensor:
        n_contexts, n_tokens = self._index.shape
        part = self._coder(side).slices[0]
        shape = n_contexts * part.n_heads, n_tokens
        units = torch.arange(shape[0])[:, None].expand(shape).flatten()
        positions = torch.arange(n_tokens).expand(shape).flatten()
        rows = self._read(side, units, positions, torch.device("cpu"))
        return rows.view(n_contexts, part.n_heads, n_tokens, part.dim)


@dataclass(frozen=True)
class HostCodec:
    """A codec as a press' ``host_codec``: sealed layers keep their full copy on the host as coded rows.

    Parameters
    ----------
    codec : KVTC
        With one layer per group and ``layout="fetch"``.

    Raises
    ------
    CodecError
        If single layers' rows cannot be read alone from what the codec writes.

    Examples
    --------
    >>> codec = KVTC(artefact, model, KvtcConfig(ratio=4, mode="static", layout="fetch"))  # doctest: +SKIP
    >>> press = VerKVPress(KVzipPress(), 0.9375, host_codec=HostCodec(codec))  # doctest: +SKIP
    """

    codec: KVTC

    def __post_init__(self):
        check_host_codec(self.codec)

    def encode(self, layer: int, keys: Tensor, values: Tensor, n_padding: Tensor) -> CompressedHostTier:
        """Code a layer's full keys and values; see :meth:`CompressedHostTier.encode`."""
        return CompressedHostTier.encode(self.codec, layer, keys, values, n_padding)


def check_host_codec(codec: KVTC) -> None:
    """Raise CodecError unless single layers' rows can be read alone from what the codec writes."""
    if any(len(group.layers) > 1 for group in codec.layout.groups):
        raise CodecError(
            "a compressed host tier needs a calibration with layers_per_group=1: rows that all layers share would be "
            "read whole for one layer"
        )
    if codec.config.layout != "fetch":
        raise CodecError(f"a compressed host tier needs layout='fetch', the codec has {codec.config.layout!r}")


@torch.no_grad()
def denominator_error(tier, keys: Tensor, queries: Tensor, scaling: float, n_padding: Tensor | None = None) -> Tensor:
    """How far the softmax denominators over restored keys are from those over the model's own, abs(D^ / D - 1).

    Parameters
    ----------
    tier : CompressedHostTier
    keys : Tensor, shape (C, Hkv, T, d)
        As they were before coding.
    queries : Tensor, shape (C, Hq, M, d)
        As attention sees them.
    scaling : float
        Factor of <k, q>.
    n_padding : Tensor, shape (C,), int64, optional

    Returns
    -------
    Tensor, shape (C, Hq, M)
    """
    group = queries.shape[1] // keys.shape[1]
    is_token = torch.arange(keys.shape[2]) >= (0 if n_padding is None else n_padding.cpu()[:, None])
    is_token = is_token.expand(len(keys), -1)[:, None, None]

    def log_denominator(k: Tensor) -> Tensor:
        logits = queries.cpu().float() @ k.cpu().float().repeat_interleave(group, 1).mT * scaling
        return logits.masked_fill(~is_token, -torch.inf).logsumexp(-1)

    return (log_denominator(tier.keys) - log_denominator(keys)).expm1().abs()


def _encode_context(
    codec: KVTC, layer: int, states: dict[str, Tensor], n_padding: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Coded rows by side and which tokens (T,) are kept as they are, of one context's states (Hkv, T, d)."""
    n_tokens, settings = states["k"].shape[1], codec.config
    position = torch.arange(n_tokens) - n_padding
    is_exact = (position < settings.sinks) | (torch.arange(n_tokens) >= n_tokens - settings.window)
    tokens = (~is_exact).nonzero()[:, 0]
    group, coded, score = codec.layout.group_of(layer), {}, torch.zeros(len(tokens))
    for side in SIDES:

        def states_of(part, side=side) -> Tensor:
            chosen = states[side][:, tokens.to(states[side].device)].float()
            return codec.rotary.undo(chosen, position[tokens]) if side == "k" else chosen

        coded[side], residual, relative = codec.sides[group, side].encode(states_of, Stages())
        score = score.maximum(residual).maximum(relative)
    is_outlier = find_outliers(score, settings.outlier_factor, int(settings.outlier_fraction * len(tokens)))
    is_exact[tokens[is_outlier]] = True
    rows = {}
    for side in SIDES:
        coder = codec.sides[group, side].coder
        rows[side] = coder.write_rows([run.select(~is_outlier) for run in coded[side]])
    return rows, is_exact
