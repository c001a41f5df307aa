"""Fit the transform of a model's cache: rows from prefilled texts, principal axes, quantiser steps, bit plans.

Section 3 and appendix B.1 of [1]_: keys with RoPE undone and values as they are, the attention sinks left out, all
heads of a group of layers concatenated to one row per token. The axes are fitted to most rows; steps and plans to rows
that were held out, on which leading axes do not look better than they are.

References
----------
.. [1] "KV Cache Transform Coding for Compact Storage in LLM Inference", arXiv:2511.01815v1.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv import __version__
from verkv.codecs.artefact import INV_FREQ, Artefact, save_artefact
from verkv.codecs.bit_allocation import make_table
from verkv.codecs.cache_access import coded_states, dense_cache, find_rotary, layout_of_cache
from verkv.codecs.layout import SIDES, CacheLayout, check_positions, states_to_rows
from verkv.codecs.model_binding import config_hash, weights_hash
from verkv.codecs.principal import Principal, RowSpool, StreamingCovariance, power_iteration
from verkv.codecs.quantiser import BLOCK, MODES, fit_steps

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class CalibrationConfig:
    """How a calibration is made.

    Parameters
    ----------
    layers_per_group : int or "all"
        Layers that share a basis. "all" compresses best; 1 allows a row of one layer to be read alone.
    min_ratio : float >= 1
        Smallest compression ratio that the plans shall serve.
    rank : int, optional
        Axes to keep; by default those that could have 4 bits each at ``min_ratio``.
    sinks : int
        Leading positions of every text that are left out.
    holdout_rows : int
        Rows that steps and plans are fitted to; at most a quarter of all.
    float32_basis : bool
        Store the basis in float32 instead of bfloat16.
    exact_features : int
        Widest row for which the covariance is formed; wider ones use block power iteration on rows spooled to disk.
    n_iterations : int
        Of the block power iteration.
    seed : int

    Raises
    ------
    ValueError
        If a value is out of range.
    """

    layers_per_group: int | str = "all"
    min_ratio: float = 8.0
    rank: int | None = None
    sinks: int = 4
    holdout_rows: int = 2048
    float32_basis: bool = False
    exact_features: int = 8192
    n_iterations: int = 8
    seed: int = 0

    def __post_init__(self):
        if not self.min_ratio >= 1.0:
            raise ValueError(f"min_ratio must be at least 1, got {self.min_ratio!r}")
        for name, least in (("sinks", 0), ("holdout_rows", 1), ("exact_features", 1), ("n_iterations", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.rank is not None and (not isinstance(self.rank, int) or self.rank < BLOCK):
            raise ValueError(f"rank must be an integer of at least {BLOCK} or None, got {self.rank!r}")


class Calibrator:
    """Collects rows of prefilled caches and fits the transform.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model. Refused if its RoPE depends on the length.
    settings : CalibrationConfig

    Examples
    --------
    >>> calibrator = Calibrator(model.config)  # doctest: +SKIP
    >>> for cache in prefilled:  # doctest: +SKIP
    ...     calibrator.add(cache)
    >>> calibrator.save("model.kvtc.safetensors", model)  # doctest: +SKIP
    """

    def __init__(self, config, settings: CalibrationConfig | None = None):
        self.config, self.settings = config, settings or CalibrationConfig()
        self.rotary = find_rotary(config)
        self.layout: CacheLayout | None = None
        self.n_tokens = 0
        self._fits: dict[tuple[int, str], StreamingCovariance | RowSpool] = {}
        self._held_out: dict[tuple[int, str], list[Tensor]] = {}
        self._generator = torch.Generator().manual_seed(self.settings.seed)
        self._n_held_out = 0

    @torch.no_grad()
    def add(self, cache, positions: Tensor | None = None, holdout_share: float = 0.05) -> None:
        """Count the tokens of a prefilled cache of one sequence.

        Parameters
        ----------
        cache : transformers.Cache
            One text, starting with its first token.
        positions : Tensor, shape (T,), optional
            RoPE positions; 0 .. T - 1 by default.
        holdout_share : float
            Chance of a row to be held out, until there are enough.

        Raises
        ------
        MismatchError
            If the cache's layers differ from those before.
        """
        if self.layout is None:
            self.layout = layout_of_cache(cache, self.config, self.settings.layers_per_group)
        n_tokens = cache.get_seq_length()
        positions = check_positions(positions, n_tokens)
        rows = torch.arange(n_tokens)[self.settings.sinks :]
        held_out = torch.rand(len(rows), generator=self._generator) < holdout_share
        held_out &= (held_out.cumsum(0) + self._n_held_out) <= self.settings.holdout_rows
        self._n_held_out += int(held_out.sum())
        self.n_tokens += len(rows)
        for g, group in enumerate(self.layout.groups):
            for side in SIDES:
                states = coded_rows(cache, group, side, self.rotary, positions, rows)
                self._fit_of(g, side).add(states[~held_out])
                self._held_out.setdefault((g, side), []).append(states[held_out].clone())

    def fit(self, progress: Progress | None = None) -> tuple[dict[str, Tensor], dict]:
        """Axes, steps and tables as tensors, and the errors to expect.

        Parameters
        ----------
        progress : callable, optional
            Called with the stage's name, and how much of how much is done.

        Returns
        -------
        tensors : dict of str to Tensor
        errors : dict
            Held-out relative errors by group, side, mode and ratio.

        Raises
        ------
        ValueError
            If too few tokens were added.
        """
        if self.layout is None or self._n_held_out < 2 or self.n_tokens - self._n_held_out < 2:
            raise ValueError(
                f"{self.n_tokens} tokens (sinks left out) are too few to calibrate with; add longer texts, about as "
                f"many tokens as a row has features, better seven times as many"
            )
        tensors, errors = {INV_FREQ: self.rotary.inv_freq}, {}
        keys = sorted(self._fits)
        for number, (g, side) in enumerate(keys):
            if progress is not None:
                progress("axes and plans", number, len(keys))
            fitted, errors[f"g{g}.{side}"] = self._fit_side(g, side)
            tensors |= {f"g{g}.{side}.{part}": tensor for part, tensor in fitted.items()}
        if progress is not None:
            progress("axes and plans", len(keys), len(keys))
        return tensors, errors

    def save(self, path: str | os.PathLike, model, sources: str = "", progress: Progress | None = None) -> Artefact:
        """Fit and write the calibration of a model; returns it opened."""
        tensors, errors = self.fit(progress)
        metadata = {
            "model": getattr(model.config, "name_or_path", "") or model.config.model_type,
            "config_sha256": config_hash(model.config),
            "weights_sha256": weights_hash(model),
            "layout": self.layout.to_json(),
            "min_ratio": self.settings.min_ratio,
            "settings": dataclasses.asdict(self.settings),
            "sources": sources,
            "n_tokens": self.n_tokens,
            "n_held_out": self._n_held_out,
            "held_out_error": errors,
            "verkv": __version__,
        }
        save_artefact(path, tensors, metadata)
        return Artefact(path)

    # --- internals --------------------------------------------------------------------------------------------------

    def _fit_of(self, group: int, side: str) -> StreamingCovariance | RowSpool:
        key = group, side
        if key not in self._fits:
            width = self.layout.groups[group].width(side)
            is_exact = width <= self.settings.exact_features
            self._fits[key] = StreamingCovariance(width) if is_exact else RowSpool(width)
        return self._fits[key]

    def _principal(self, group: int, side: str, rank: int) -> Principal:
        fit = self._fits.pop((group, side))  # frees the covariance when the axes are known
        if isinstance(fit, StreamingCovariance):
            return fit.principal(rank)
        return power_iteration(fit.chunks, rank, self.settings.n_iterations, self.settings.seed)

    def _fit_side(self, group: int, side: str) -> tuple[dict[str, Tensor], dict]:
        width = self.layout.groups[group].width(side)
        rank = min(width, self.settings.rank or round(4 * width / self.settings.min_ratio))
        principal = self._principal(group, side, rank)
        missing = -rank % BLOCK  # whole blocks of coordinates; an axis of zeros holds nothing
        basis = torch.nn.functional.pad(principal.basis, (0, missing))
        if not self.settings.float32_basis:
            basis = basis.bfloat16()
        held_out = torch.cat(self._held_out.pop((group, side))).float()
        centred = held_out - principal.mean
        coordinates = centred @ basis.float()
        steps, step_errors = fit_steps(coordinates)
        fitted = {
            "mean": principal.mean,
            "basis": basis,
            "var": torch.nn.functional.pad(principal.variance, (0, missing)),
            "step": steps,
            "tail": (centred - coordinates @ basis.float().T).square().mean(0),
        }
        max_bits = int(16 * width / self.settings.min_ratio)
        errors = {}
        for mode in MODES:
            table = make_table(mode, coordinates, step_errors, max_bits)
            fitted[f"table.{mode}"] = torch.from_numpy(table.choices)
            fitted[f"error.{mode}"] = torch.from_numpy(table.errors)
            errors[mode] = _errors_by_ratio(table, width, held_out, float(fitted["tail"].sum()))
        return fitted, errors


def coded_rows(cache, group, side: str, rotary, positions: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the transform for some tokens of a cache: heads of the group's layers side by side, keys without RoPE.

    Parameters
    ----------
    cache : transformers.Cache
        Of one sequence.
    group : GroupLayout
    side : {"k", "v"}
    rotary : Rotary
    positions : Tensor, shape (T,)
        Of all tokens.
    tokens : Tensor, shape (n,), int64
        Indices into the sequence.

    Returns
    -------
    Tensor, shape (n, p), float32
    """
    rows = torch.empty(len(tokens), group.width(side))
    for part in group.slices(side):
        states = coded_states(cache, part, side)[:, tokens].to("cpu", torch.float32)
        if side == "k":
            states = rotary.undo(states, positions[tokens])
        rows[:, part.rows] = states_to_rows(states)
    return rows


def _errors_by_ratio(table, width: int, held_out: Tensor, tail: float) -> dict[str, float]:
    energy = float(held_out.double().square().sum(1).mean())
    found = {}
    for ratio in (1, 2, 4, 8, 16, 32, 64):
        bits = 16 * width / ratio
        if bits < table.max_bits + 1:
            found[str(ratio)] = ((table.expected_error(bits) + tail) / max(energy, 1e-30)) ** 0.5
    return found


@torch.inference_mode()
def calibrate(
    model,
    token_sequences: Iterable[Tensor],
    path: str | os.PathLike,
    settings: CalibrationConfig | None = None,
    sources: str = "",
    progress: Progress | None = None,
) -> Artefact:
    """Prefill texts, fit the transform of the model's cache, and write it.

    Parameters
    ----------
    model : PreTrainedModel
    token_sequences : iterable of Tensor, shape (T,), int64
        Texts of the kind that will be compressed; each is prefilled alone. Long ones matter for long contexts.
    path : path-like
        Of the safetensors file.
    settings : CalibrationConfig, optional
    sources : str
        What the texts are, for the record.
    progress : callable, optional
        Called with the stage's name, and how much of how much is done.

    Returns
    -------
    Artefact

    Raises
    ------
    NotImplementedError
        For models whose RoPE depends on the length.
    ValueError
        If the texts are too short.
    """
    settings = settings or CalibrationConfig()
    calibrator = Calibrator(model.config, settings)
    sequences = [torch.as_tensor(ids).view(-1) for ids in token_sequences]
    n_rows = sum(max(0, len(ids) - settings.sinks) for ids in sequences)
    share = min(0.25, 1.2 * settings.holdout_rows / max(1, n_rows))
    for number, ids in enumerate(sequences):
        if progress is not None:
            progress("prefilling texts", number, len(sequences))
        if len(ids) <= settings.sinks:
            continue
        cache = dense_cache(model.config)
        backbone = getattr(model, "model", None) or model.base_model
        backbone(input_ids=ids[None].to(model.device), past_key_values=cache)
        calibrator.add(cache, holdout_share=share)
    if progress is not None:
        progress("prefilling texts", len(sequences), len(sequences))
    return calibrator.save(path, model, sources, progress)
