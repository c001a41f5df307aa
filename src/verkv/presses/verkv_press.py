"""VerKV: PoissonComp's sample, a sketch of all keys, and verified fetching from the host (Algorithm 2)."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv import sketches
from verkv.kvfetch import TARGETS, FetchConfig
from verkv.presses.poissoncomp_press import PoissonCompPress
from verkv.presses.prompt import Prompt
from verkv.presses.queries import Queries
from verkv.presses.tolerance import SCOPES, ToleranceCalibration, split_queries
from verkv.rotary import Rotary, has_rotary, rotary_dim, rotary_from_config
from verkv.sketches import ExactSketch, RopePairSketch, Sketch
from verkv.sketches.fit import FittedSketch, fit_segment, fit_sketch
from verkv.stats import FetchStats

# Sketches by name, made for a model's config.
SKETCHES = {
    "transform": lambda config: sketches.TransformSketch(rotary=_rotary(config)),
    "rope_pair": lambda config: RopePairSketch(rotary_dim=rotary_dim(config)),
    "query_pca": lambda config: sketches.QueryPCASketch(),
    "page_minmax": lambda config: sketches.PageMinMaxSketch(),
    "product_quantization": lambda config: sketches.ProductQuantizationSketch(),
    "exact": lambda config: ExactSketch(charged_as=RopePairSketch(rotary_dim=rotary_dim(config))),
}
OUTLIERS_OF_BUDGET = 0.1  # at most, of the tokens that the budget pays for beyond the protected ones
N_QUERIES = 128  # positions at the end of the prompt whose queries are kept until it is sealed

MEASURED_BEST = {"alpha": 0.5, "sketch": "transform", "outliers": 0.001, "error_aware": "auto", "shortlist": 0}
MEASURED_BEST |= {"sided": True}
PAPER = {"alpha": 0.0, "sketch": "rope_pair", "outliers": 0.0, "error_aware": False, "shortlist": 128, "sided": False}

# Part of delta for denominators estimated too large, where the sides are bounded apart. 0.6 to 0.75 read alike
# (``docs/results/adherence.md``).
UPPER_SHARE = 0.7

# Below this variance of a KV head's sketched logits, planning with its moments changes no violation rate measured
# (``docs/results/adherence.md``) and reads more.
LARGE_VARIANCE = 0.5


@dataclass
class VerKVPress(PoissonCompPress):
    """Compress the prompt's cache; at every step certify each head's softmax denominator, and fetch what is missing.

    The full cache stays in host memory. On the device stay a Poisson sample, a sketch of the keys and one byte a
    token. For every query head, a Bernstein bound on the relative error of the denominator is computed; where it is
    not below ``epsilon``, the fewest tokens that bring it there are made exact, from the host if they are not
    resident.

    "Verified" means: for a query fixed before the draw, the denominator's relative error exceeds epsilon with
    probability at most delta, *given exact weights* (Lemma 1, Theorem 2 of [1]_). With a sketch it holds as far as
    measured; ``audit`` measures it.

    Options that are None take the values that measured best (``docs/results/adherence.md``); with ``paper=True`` they
    take the paper's, and the whole is its published algorithm.

    Parameters
    ----------
    press, compression_ratio, n_sink, n_local, budget_scope, seed, audit
        As in :class:`~verkv.presses.poissoncomp_press.PoissonCompPress`. The sketch and the byte per token are paid
        from the budget.
    alpha : float in [0, 1], optional
        Defensive mixture of the scores with their mean. Default 0.5; 0 with ``paper=True``.
    sketch : {"transform", "rope_pair", "query_pca", "page_minmax", "product_quantization", "exact"} or Sketch, optional
        "transform" is the default; "rope_pair" the paper's deployable 2-bit sketch, of the same size; "exact" its
        perfect sketch, an oracle that reads host keys.
    bases : path-like or dict of int to KeyBasis, optional
        Bases of the transform sketch by layer, fitted before and saved with :func:`verkv.sketches.save_key_bases`.
        Fitted to each prompt by default.
    epsilon : float > 0
        Tolerance of the relative error.
    delta : float in (0, 1)
        Probability with which the tolerance may be missed.
    outliers : float in [0, 1), optional
        Share of the tokens, per KV head, that are kept because the sketch codes their keys worst; paid from the
        budget. Default 0.001, but at most a tenth of the sample; 0 with ``paper=True``, and for sketches without
        decoded keys.
    error_aware : {"auto", True, False}, optional
        Plan with the first two moments of a weight given its sketch, from the measured covariance of the sketch's
        error: for all KV heads, for none, or for those whose sketched logits have a variance above 0.5 on the prompt's
        queries. Default "auto"; False with ``paper=True``.
    key_rounds : int >= 0
        How often the keys of promoted tokens are read and the plan is made again, before any value is read.
    shortlist : int >= 0, optional
        Keys per KV head and forward pass that are read and scored exactly before planning (not with the exact sketch).
        Default 0; 128 with ``paper=True``.
    shrinkage : {"binary", "optimal"}
        Appendix A.2 or Definition 2.
    sided : bool, optional
        Bound denominators that come out too large and those that come out too small apart, with 0.7 and 0.3 of
        ``delta``, instead of both by Eq. (7): the same guarantee, less to read. Default True; False with
        ``paper=True``.
    max_read : float in (0, 1]
        Share of a KV head's context above which its plan is not followed: everything is read and the step is exact.
    target : {"denominator", "output"}, optional
        Whose relative error is to stay within ``epsilon``: the softmax denominator's, or the attention output's. By
        default the denominator's, as in the paper; with ``calibrate`` the output's, whose error is smaller at equal
        traffic.
    calibrate : {"head", "layer", "model"}, optional
        Find the tolerance of the plan from true errors on the prompt's last queries (split conformal), for each KV
        head, each layer, or the whole model: the target's error then exceeds ``epsilon`` with probability at most
        ``delta`` on average over queries exchangeable with those. Where there are too few queries the uncalibrated
        bound of the denominator is used.
    on_violation : {"exact", "warn", "raise"}, optional
        With ``audit``: what a step does whose true error of the target exceeds ``epsilon``. It gives the exact output
        of those decisions (the audit's own reads are not counted as KV read), warns, or raises
        :class:`~verkv.context.ToleranceViolation` and leaves the cache as it was before the step. By default it is
        only recorded.
    paper : bool
        The algorithm of Appendix A.1: also plans with the exact weights of everything that is resident. The plan then
        depends on the draw, which the theorem forbids and which costs adherence; False plans blind to the draw.
    record_bounds : bool
        Keep the bound of every decision in the statistics.
    host_codec : verkv.codecs.HostCodec, optional
        Keep the full cache on the host as coded rows, where host memory is short. Resident rows, sketch and what is
        fetched are then of the *restored* keys and values: that is what certificate, calibration and audit refer to.
        How far these are from the model's own no bound says; a note of the statistics has their relative error.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> press = VerKVPress(KVzipPress(), compression_ratio=0.9375, epsilon=0.05)  # doctest: +SKIP
    >>> with press(model):  # doctest: +SKIP
    ...     model.generate(**inputs, max_new_tokens=50)
    >>> press.stats.kv_read_per_token  # doctest: +SKIP
    """

    alpha: float | None = None
    sketch: str | Sketch | None = None
    bases: object = None
    epsilon: float = 0.05
    delta: float = 0.1
    outliers: float | None = None
    error_aware: bool | str | None = None
    key_rounds: int = 0
    shortlist: int | None = None
    shrinkage: str = "binary"
    sided: bool | None = None
    max_read: float = 1.0
    target: str | None = None
    calibrate: str | None = None
    on_violation: str | None = None
    paper: bool = False
    record_bounds: bool = False
    host_codec: object = None

    def _check_options(self) -> None:
        super()._check_options()
        self._fetch_config()
        share = self._option("outliers")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share < 1.0:
            raise ValueError(f"outliers must be a number in [0, 1), got {share!r}: it is a share of the tokens")
        if self._option("error_aware") not in (True, False, "auto"):
            raise ValueError(f"error_aware must be True, False or 'auto', got {self.error_aware!r}")
        if self.sided not in (None, True, False):
            raise ValueError(f"sided must be True, False or None, got {self.sided!r}")
        if self.target is not None and self.target not in TARGETS:
            raise ValueError(f"target must be one of {list(TARGETS)}, got {self.target!r}")
        if self.calibrate is not None and self.calibrate not in SCOPES:
            raise ValueError(f"calibrate must be None or one of {list(SCOPES)}, got {self.calibrate!r}")
        if self.on_violation not in (None, "exact", "warn", "raise"):
            raise ValueError(f"on_violation must be None, 'exact', 'warn' or 'raise', got {self.on_violation!r}")
        if self.on_violation is not None and not self.audit:
            raise ValueError("on_violation needs audit=True: without an audit true errors are not known")
        if self.paper and (self.calibrate or self._target() != "denominator"):
            raise ValueError("target and calibrate must be left as they are with paper=True: the paper has neither")
        if self.host_codec is not None and not hasattr(self.host_codec, "encode"):
            raise ValueError(
                f"host_codec must be a verkv.codecs.HostCodec, got {type(self.host_codec).__name__}: wrap a codec as "
                f"HostCodec(codec)"
            )
        sketch = self._option("sketch")
        is_sketch = hasattr(sketch, "build") and hasattr(sketch, "logits") and not isinstance(sketch, type)
        if not is_sketch and (not isinstance(sketch, str) or sketch not in SKETCHES):
            raise ValueError(f"sketch must be one of {list(SKETCHES)} or a Sketch, got {sketch!r}")

    def _coded_host(self, layer_idx: int, keys: Tensor, values: Tensor, prompt: Prompt):
        if self.host_codec is None:
            return None
        n_padding = prompt.n_padding if prompt.first is None else -prompt.first  # positions go on
        return self.host_codec.encode(layer_idx, keys, values, n_padding)

    def _option(self, name: str):
        """An option's value, or the default that goes with ``paper``."""
        value = getattr(self, name)
        if value is not None:
            return value
        return (PAPER if self.paper else MEASURED_BEST)[name]

    def _target(self) -> str:
        if self.target is not None:
            return self.target
        return "denominator" if self.calibrate is None else "output"

    def _mixture(self) -> float:
        return self._option("alpha")

    def _fetch_config(self) -> FetchConfig:
        return FetchConfig(
            self.epsilon,
            self.delta,
            self._option("shortlist"),
            self.shrinkage,
            self.paper,
            key_rounds=self.key_rounds,
            max_read=self.max_read,
            target="output" if self._bounds_output() else "denominator",
            upper_share=UPPER_SHARE if self._option("sided") else None,
        )

    def _bounds_output(self) -> bool:
        """Whether the output's own bound is planned with; calibrated tolerances are the denominator's."""
        return self._target() == "output" and self.calibrate is None

    def _violation_options(self) -> dict[str, str | None]:
        return {"on_violation": self.on_violation, "violation_target": self._target()}

    def _bytes_per_token(self) -> int:
        return 2 if self._bounds_output() else 1

    def _sketch(self, model) -> Sketch:
        sketch = self._option("sketch")
        if isinstance(sketch, str):
            return SKETCHES[sketch](model.config)
        if isinstance(sketch, RopePairSketch) and sketch.rotary_dim is None:
            return dataclasses.replace(sketch, rotary_dim=rotary_dim(model.config))
        if isinstance(sketch, sketches.TransformSketch) and sketch.rotary is None:
            return dataclasses.replace(sketch, rotary=_rotary(model.config))
        return sketch

    def _of_layer(self, sketch: Sketch, layer_idx: int) -> Sketch:
        if self.bases is None:
            return sketch
        if not isinstance(sketch, sketches.TransformSketch):
            raise ValueError(f"bases are those of the transform sketch, but sketch is {sketch.name!r}; leave one out")
        if not isinstance(self.bases, dict):
            self.bases = sketches.load_key_bases(self.bases)
        if layer_idx not in self.bases:
            raise ValueError(f"bases hold layers {sorted(self.bases)}, not layer {layer_idx}; fit them for this model")
        return dataclasses.replace(sketch, basis=self.bases[layer_idx])

    @property
    def n_recorded_queries(self) -> int:
        """Queries fit sketches, but for the paper's and the exact one, and calibrate."""
        unused = self._option("sketch") in ("rope_pair", "exact") and self.calibrate is None
        return 0 if unused else N_QUERIES

    def _n_outliers(self, prompt: Prompt, sketch: Sketch, budget: Tensor) -> Tensor:
        n_protected = prompt.n_protected.cpu()
        if sketch.is_oracle or not sketch.is_linear:
            return torch.zeros_like(n_protected)
        n_outliers = self._option("outliers") * (prompt.lengths.cpu() - n_protected).float()
        if self.outliers is None:  # a default must not take the sample's place in a small budget
            n_outliers = torch.minimum(n_outliers, OUTLIERS_OF_BUDGET * (budget - n_protected).float())
        return n_outliers.round().long()

    def _fit(
        self, sketch: Sketch, keys: Tensor, prompt: Prompt, queries: Tensor | None, n_outliers: Tensor
    ) -> FittedSketch | None:
        if sketch.is_oracle:
            return None
        if queries is not None and self.calibrate is not None:
            queries = split_queries(queries)[0]
        if queries is not None and not queries.shape[2]:
            queries = None
        least_variance = {"auto": LARGE_VARIANCE, True: 0.0, False: None}[self._option("error_aware")]
        if prompt.first is not None:
            return fit_segment(sketch, keys, prompt.is_token, prompt.first, queries, n_outliers, least_variance)
        return fit_sketch(sketch, keys, prompt.n_padding, queries, prompt.protected, n_outliers, least_variance)

    def _after_sealing(self, cache, prompt: Prompt, queries: Queries, layers: list[int]) -> list[str]:
        if self.calibrate is None:
            return []
        calibration = ToleranceCalibration(self.epsilon, self.delta, self._target(), self.calibrate, self.n_local)
        calibrating = {i: split_queries(query)[1] for i, query in queries.items()}
        contexts = {i: cache.layers[i].context for i in layers}
        calibration.run(contexts, calibrating, n_first=self.n_sink + self.n_local)
        return calibration.notes

    def _new_stats(self) -> FetchStats:
        sketch = self._option("sketch")
        return FetchStats(
            method=type(self).__name__,
            epsilon=self.epsilon,
            delta=self.delta,
            sketch=sketch if isinstance(sketch, str) else sketch.name,
            record_bounds=self.record_bounds,
        )

    def _notes(self, expected: float, variance: float, sketch: Sketch | None) -> list[str]:
        notes = super()._notes(expected, variance, sketch)
        if sketch.is_oracle:
            notes.append(
                "the exact sketch is an oracle: it reads all host keys, which KV read leaves out, and it is charged to "
                "the budget as the 2-bit sketch although it keeps nothing on the device"
            )
        if self.paper:
            notes.append("paper=True: the plan uses the exact weights of sampled tokens and so depends on the draw")
        return notes


def _rotary(config) -> Rotary | None:
    """The model's rotation, None if it has none; raises ValueError for one that depends on the length."""
    return rotary_from_config(config) if has_rotary(config) else None
