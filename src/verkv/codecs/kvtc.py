"""The kvtc codec: a cache of one sequence to coded rows, and more tokens behind them without coding again."""

import dataclasses
import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.codecs import lossless
from verkv.codecs.artefact import Artefact
from verkv.codecs.cache_access import cache_dtype, coded_states, find_rotary
from verkv.codecs.compressed import CompressedCache
from verkv.codecs.config import KvtcConfig
from verkv.codecs.container import EXACT, EXACT_INDEX, POSITIONS, ROWS, MemorySections, Section, SectionKey
from verkv.codecs.errors import MismatchError
from verkv.codecs.layout import SIDES, check_positions
from verkv.codecs.model_binding import hash_tokens
from verkv.codecs.raw_layers import put_layers, uncoded_layers
from verkv.codecs.tensor_store import TensorWriter, dtype_name, tensor_bytes
from verkv.codecs.transform import SideCodec, Stages, find_outliers

FAR_FROM_CALIBRATION = 1.5  # residuals so many times the calibrated ones are worth a warning


class KVTC:
    """A codec for the caches of one model: KV Cache Transform Coding of [1]_.

    Parameters
    ----------
    artefact : Artefact or path-like
        The model's calibration.
    model : PreTrainedModel or PreTrainedConfig
        With a model, the calibration's hashes of its weights are compared, too.
    config : KvtcConfig, optional

    Raises
    ------
    MismatchError
        If the calibration is of another model, or serves no ratio so small.
    NotImplementedError
        For models whose RoPE depends on the length.

    References
    ----------
    .. [1] "KV Cache Transform Coding for Compact Storage in LLM Inference", arXiv:2511.01815v1.

    Examples
    --------
    >>> codec = KVTC("model.kvtc.safetensors", model, KvtcConfig(ratio=16))  # doctest: +SKIP
    >>> compressed = codec.compress(cache)  # doctest: +SKIP
    >>> cache = compressed.restore()  # doctest: +SKIP
    """

    def __init__(self, artefact: Artefact | str | os.PathLike, model, config: KvtcConfig | None = None):
        self.artefact = artefact if isinstance(artefact, Artefact) else Artefact(artefact)
        self.config = config or KvtcConfig()
        self.model_config = getattr(model, "config", model)
        find_rotary(self.model_config)  # refuses
        self.artefact.check_config(self.model_config)
        if hasattr(model, "named_parameters"):
            self.artefact.check_model(model)
        for side in SIDES:
            if self.config.side_ratio(side) < self.artefact.min_ratio:
                raise MismatchError(
                    f"the calibration serves ratios from {self.artefact.min_ratio:g} on, {side}_ratio is "
                    f"{self.config.side_ratio(side):g}; calibrate with a smaller min_ratio"
                )
        self.layout = self.artefact.layout
        self.rotary = self.artefact.rotary
        self.sides = {
            (g, side): SideCodec(self.artefact, g, side, self.config.mode, self.config.side_ratio(side))
            for g in range(len(self.layout.groups))
            for side in SIDES
        }

    def bits_per_token(self, side: str) -> int:
        """Coded bits of a token, K or V, before lossless compression."""
        return sum(codec.coder.bits for (_, s), codec in self.sides.items() if s == side)

    @torch.no_grad()
    def compress(
        self, cache, positions: Tensor | None = None, token_ids: Tensor | None = None, stages: Stages | None = None
    ) -> CompressedCache:
        """Code a cache of one sequence.

        Parameters
        ----------
        cache : transformers.Cache
            Prefilled, of the model of the calibration; of a sealed one the host tier is coded.
        positions : Tensor, shape (T,), optional
            RoPE positions of the tokens; 0 .. T - 1 by default.
        token_ids : Tensor, shape (T,), optional
            Their hash is stored, so that the context can be recognised as the prefix of a prompt.
        stages : Stages, optional
            Gets the seconds of each stage.

        Returns
        -------
        CompressedCache

        Raises
        ------
        CodecError
            If the cache is empty, holds several sequences, does not fit the calibration, or is not finite.
        """
        return self._code(None, cache, positions, token_ids, Stages() if stages is None else stages)

    @torch.no_grad()
    def append(
        self,
        compressed: CompressedCache,
        cache,
        positions: Tensor | None = None,
        token_ids: Tensor | None = None,
        stages: Stages | None = None,
    ) -> CompressedCache:
        """Code what a cache holds behind a context that is coded already; what was coded stays as it is.

        Parameters
        ----------
        compressed : CompressedCache
            Of this codec. It is not changed.
        cache : transformers.Cache
            The whole sequence: the context, restored or original, and the tokens since.
        positions, token_ids, stages
            As in :meth:`compress`, of the whole sequence.

        Returns
        -------
        CompressedCache

        Raises
        ------
        MismatchError
            If the cache does not begin with the context, as far as its kept rows tell.
        """
        if (
            compressed.codec.artefact.content_hash != self.artefact.content_hash
            or compressed.codec.config != self.config
        ):
            raise MismatchError(
                "the context was compressed with another calibration or configuration; use its own codec"
            )
        return self._code(compressed, cache, positions, token_ids, Stages() if stages is None else stages)

    # --- internals --------------------------------------------------------------------------------------------------

    def _code(self, old: CompressedCache | None, cache, positions, token_ids, stages: Stages) -> CompressedCache:
        n_tokens = coded_states(cache, self.layout.groups[0].k[0], "k").shape[1]
        positions = check_positions(positions, n_tokens)
        token_hash = hash_tokens(token_ids, n_tokens)
        if old is not None:
            self._check_prefix(old, cache, positions, token_ids, n_tokens)
        permanent, to_code = self._split(old, n_tokens)
        work = _Work.after(old)
        for tokens in to_code.split(self.config.block_tokens):
            self._code_block(work, cache, positions, tokens, stages)
        n_window = min(self.config.window, max(0, n_tokens - self.config.sinks))
        window = torch.arange(n_tokens - n_window, n_tokens)
        exact_index = torch.cat([permanent, *work.outliers, window]).unique()
        self._keep_rows(work.sections, cache, positions, exact_index)
        segment = {
            "kind": "kvtc",
            "artefact_sha256": self.artefact.content_hash,
            "config": dataclasses.asdict(self.config),
            "layout": self.layout.to_json(),
            "n_tokens": n_tokens,
            "n_exact": len(exact_index),
            "n_outliers": work.n_outliers,
            "n_window": n_window,
            "blocks": work.blocks,
            "k_bits": self.bits_per_token("k"),
            "v_bits": self.bits_per_token("v"),
            "dtype": dtype_name(cache_dtype(cache, self.layout.layers[0])),
            "token_ids_sha256": token_hash,
            "residuals": work.residuals,
        }
        segment |= self._keep_raw_layers(work.sections, cache)
        compressed = CompressedCache(self, segment, MemorySections(work.sections))
        if len(to_code):
            _warn_if_far(compressed)
        return compressed

    def _split(self, old: CompressedCache | None, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Tokens that stay exact for good (sinks, earlier outliers), and those to code now."""
        sinks, window = self.config.sinks, self.config.window
        if old is None:
            permanent, first = torch.arange(min(sinks, n_tokens)), sinks
        else:
            exact, first = old.exact_index, max(sinks, old.n_tokens - window)
            permanent = torch.cat([torch.arange(min(sinks, n_tokens)), exact[(exact >= sinks) & (exact < first)]])
        return permanent, torch.arange(first, max(first, n_tokens - window))

    def _code_block(self, work: "_Work", cache, positions: Tensor, tokens: Tensor, stages: Stages) -> None:
        """Code some tokens as one block, but for those that shall rather be kept as they are."""
        if not len(tokens):
            return
        coded, squared, score = {}, {}, torch.zeros(len(tokens))
        for (g, side), codec in self.sides.items():
            states_of = self.states_reader(cache, side, positions, tokens)
            coded[g, side], squared[g, side], relative = codec.encode(states_of, stages)
            score = score.maximum(squared[g, side]).maximum(relative)
        allowed = int(self.config.outlier_fraction * (work.n_seen + len(tokens))) - work.n_outliers
        is_outlier = find_outliers(score, self.config.outlier_factor, allowed)
        work.add(tokens, is_outlier, squared)
        n_kept = int((~is_outlier).sum())
        if not n_kept:
            return
        for (g, side), runs in coded.items():
            key = SectionKey(ROWS, 0, g, len(work.blocks), SIDES.index(side))
            kept = runs if n_kept == len(tokens) else [run.select(~is_outlier) for run in runs]
            work.sections[key] = self._packed(self.sides[g, side].coder, kept, stages)
        work.blocks.append(n_kept)

    def states_reader(self, cache, side: str, positions: Tensor, tokens: Tensor):
        """A function that gives the states (H, n, d) of a layer for some tokens, keys without RoPE."""

        def states_of(part) -> Tensor:
            states = coded_states(cache, part, side)
            chosen = states[:, tokens.to(states.device)].float()
            return self.rotary.undo(chosen, positions[tokens]) if side == "k" else chosen

        return states_of

    def _packed(self, coder, runs, stages: Stages) -> Section:
        with stages("pack"):
            data = tensor_bytes(coder.write(runs, self.config.layout))
        assert len(data) == len(runs[0].values) * coder.row_bytes  # bits written are bits planned
        with stages("deflate"):
            stored = lossless.compress(self.config.lossless, data)
            stored_as = lossless.FORMATS[self.config.lossless]
            if len(stored) >= len(data):
                stored, stored_as = bytes(data), lossless.STORED
        return Section(stored, len(data), stored_as)

    def _keep_rows(self, sections: dict, cache, positions: Tensor, exact_index: Tensor) -> None:
        """Add positions, and the rows that are kept as they are, layer by layer."""

        def keep(key: SectionKey, tensor: Tensor) -> None:
            data = bytes(tensor_bytes(tensor))
            sections[key] = Section(data, len(data))

        keep(SectionKey(POSITIONS), positions)
        keep(SectionKey(EXACT_INDEX), exact_index.to(torch.int32))
        for group in self.layout.groups:
            for number, side in enumerate(SIDES):
                for part in group.slices(side):
                    states = coded_states(cache, part, side)
                    keep(SectionKey(EXACT, 0, part.layer, 0, number), states[:, exact_index.to(states.device)])

    def _keep_raw_layers(self, sections: dict, cache) -> dict:
        """Add layers that are not coded; returns what the header must say of them."""
        writer = TensorWriter()
        described = put_layers(writer, cache, uncoded_layers(cache, self.model_config))
        for key, section in writer.sections:
            sections[key] = Section(bytes(section.data), section.raw_length)  # the cache may go on being used
        return {"raw_layers": described, "tensors": writer.table}

    def _check_prefix(self, old: CompressedCache, cache, positions: Tensor, token_ids, n_tokens: int) -> None:
        if n_tokens < old.n_tokens or not torch.equal(positions[: old.n_tokens], old.positions):
            raise MismatchError(
                f"the cache of {n_tokens} tokens does not continue the stored context of {old.n_tokens}: it is "
                f"shorter, or its positions differ"
            )
        if token_ids is not None and not old.is_prefix_of(token_ids):
            raise MismatchError("token_ids do not begin with the tokens of the stored context")
        part = self.layout.groups[0].k[0]
        kept = coded_states(cache, part, "k")[:, old.exact_index].cpu()
        if not torch.equal(kept, old.exact_rows(part, "k")):
            raise MismatchError("the cache's first rows are not those of the stored context; append to its own cache")


@dataclass
class _Work:
    """What has been coded so far: sections, tokens of each block, squared residuals by side, outliers."""

    sections: dict[SectionKey, Section]
    blocks: list[int]
    residuals: dict[str, list]
    n_outliers: int
    n_seen: int
    outliers: list[Tensor]

    @classmethod
    def after(cls, old: CompressedCache | None) -> "_Work":
        """The coded rows of an earlier context, as they are."""
        if old is None:
            return cls({}, [], {side: [0.0, 0] for side in SIDES}, 0, 0, [])
        rows = {key: old.sections.stored(key) for key in old.sections if key.kind == ROWS}
        n_seen = sum(old.blocks) + old.n_outliers
        return cls(rows, list(old.blocks), old.residual_sums(), old.n_outliers, n_seen, [])

    def add(self, tokens: Tensor, is_outlier: Tensor, squared: dict[tuple[int, str], Tensor]) -> None:
        """Count a block's tokens and residuals."""
        self.n_seen += len(tokens)
        self.outliers.append(tokens[is_outlier])
        self.n_outliers += int(is_outlier.sum())
        for (_, side), values in squared.items():
            self.residuals[side][0] += float(values[~is_outlier].sum())
            self.residuals[side][1] += int((~is_outlier).sum())


def _warn_if_far(compressed: CompressedCache) -> None:
    far = {side: ratio for side, ratio in compressed.residual_ratio().items() if ratio > FAR_FROM_CALIBRATION}
    if far:
        found = ", ".join(f"{side.upper()} {ratio:.2f}" for side, ratio in far.items())
        warnings.warn(
            f"residuals are larger than on the calibration text ({found} times): the context is of another kind. "
            f"Calibrate on such text, too, or use a smaller ratio",
            stacklevel=5,
        )
