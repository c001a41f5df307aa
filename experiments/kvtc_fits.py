"""Fits of kvtc's transform that the ablations need: fewer layers to a basis, fewer tokens to fit to."""

from collections.abc import Iterator
from pathlib import Path

import torch
from kvtc_common import Setting, calibration_sequences, say, test_texts
from kvtc_table import prefill
from torch import Tensor

from verkv.codecs import Artefact, CalibrationConfig, Calibrator
from verkv.codecs.calibration import coded_rows
from verkv.codecs.layout import SIDES
from verkv.codecs.principal import StreamingCovariance


class Artefacts:
    """Calibrations by layers per group: the setting's own for "all", others from the same texts, made when missing.

    Parameters
    ----------
    setting : Setting
    folder : Path
        Where they are kept.
    n_tokens : int
        To calibrate with.
    """

    def __init__(self, setting: Setting, folder: Path, n_tokens: int):
        self.setting, self.folder, self.n_tokens = setting, folder, n_tokens
        self._opened: dict[int | str, Artefact] = {"all": setting.artefact}

    def __call__(self, layers: int | str) -> Artefact:
        """The calibration whose bases serve ``layers`` layers each."""
        if layers not in self._opened:
            self._opened[layers] = Artefact(self._path(layers))
        return self._opened[layers]

    def prepare(self, groups: set[int | str]) -> None:
        """Make those that are missing, all in one pass over the texts."""
        missing = sorted(n for n in groups - {"all"} if not self._path(n).exists())
        if missing:
            self._make(missing)

    def _path(self, layers: int) -> Path:
        return self.folder / f"kvtc_{self.n_tokens}_layers{layers}.safetensors"

    @torch.inference_mode()
    def _make(self, groups: list[int]) -> None:
        model, sequences = self.setting.model, calibration_sequences(self.setting.tokenizer, self.n_tokens)
        calibrators = {n: Calibrator(model.config, CalibrationConfig(layers_per_group=n)) for n in groups}
        share = min(0.25, 1.2 * CalibrationConfig().holdout_rows / sum(map(len, sequences)))
        for number, ids in enumerate(sequences):
            cache = prefill(model, ids)
            for calibrator in calibrators.values():
                calibrator.add(cache, holdout_share=share)
            say(f"calibrating on text {number + 1} of {len(sequences)}")
        for layers, calibrator in calibrators.items():
            calibrator.save(self._path(layers), model, sources="pydoc_data.topics")
            say(f"calibrated {layers} layers to a basis")


def fit_lines(setting: Setting, sizes: list[int], rank_share: float, n_texts: int) -> Iterator[dict]:
    """Figure 6, left: error of the rank-limited, unquantised decomposition by the tokens that it is fitted to.

    Parameters
    ----------
    setting : Setting
    sizes : list of int
        Tokens; counted in whole texts.
    rank_share : float
        Axes over features.
    n_texts : int
        Test texts of the same domain.
    """
    group = setting.artefact.layout.groups[0]
    fits = {side: StreamingCovariance(group.width(side)) for side in SIDES}
    tests = [_rows(setting, ids) for ids in test_texts(setting.tokenizer, n_texts)]
    rows = {side: torch.cat([test[side] for test in tests]) for side in SIDES}
    left = sorted(sizes)
    for ids in calibration_sequences(setting.tokenizer, max(sizes)):
        for side, found in _rows(setting, ids).items():
            fits[side].add(found)
        if left and fits["k"].n_rows >= 0.99 * left[0]:  # without the sinks
            line = {"kind": "fit", "n_tokens": left.pop(0), "n_rows": fits["k"].n_rows, "n_texts": n_texts}
            for side in SIDES:
                line[f"{side}_error"] = _error(fits[side], rows[side], rank_share)
            yield line
            say(f"fitted to {line['n_rows']} rows")


def _rows(setting: Setting, ids: Tensor) -> dict[str, Tensor]:
    artefact, sinks = setting.artefact, setting.artefact.metadata["settings"]["sinks"]
    cache, positions = prefill(setting.model, ids), torch.arange(len(ids))
    group = artefact.layout.groups[0]
    return {side: coded_rows(cache, group, side, artefact.rotary, positions, positions[sinks:]) for side in SIDES}


def _error(fit: StreamingCovariance, rows: Tensor, rank_share: float) -> float:
    """Relative error of rows (n, p) outside the leading axes."""
    axes = fit.principal(round(rank_share * rows.shape[1]))
    centred = rows - axes.mean
    left = centred - centred @ axes.basis @ axes.basis.T
    return float(left.norm() / rows.norm())
