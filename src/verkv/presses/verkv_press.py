"""VerKV: PoissonComp's sample, a sketch of all keys, and verified fetching from the host (Algorithm 2)."""

import dataclasses
from dataclasses import dataclass

from verkv.kvfetch import FetchConfig
from verkv.presses.poissoncomp_press import PoissonCompPress
from verkv.rotary import rotary_dim
from verkv.sketches import ExactSketch, RopePairSketch, Sketch
from verkv.stats import FetchStats


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

    Parameters
    ----------
    press, compression_ratio, n_sink, n_local, alpha, budget_scope, seed, audit
        As in :class:`~verkv.presses.poissoncomp_press.PoissonCompPress`. The sketch and the byte per token are paid
        from the budget.
    sketch : {"rope_pair", "exact"} or Sketch
        "rope_pair" is the paper's deployable 2-bit sketch; "exact" its perfect sketch, an oracle that reads host keys.
    epsilon : float > 0
        Tolerance of the relative error.
    delta : float in (0, 1)
        Probability with which the tolerance may be missed.
    shortlist : int >= 0
        Keys per KV head and forward pass that are read and scored exactly before planning (not with the exact sketch).
    shrinkage : {"binary", "optimal"}
        Appendix A.2 or Definition 2.
    paper : bool
        Plan as in Appendix A.1, with the exact weights of everything that is resident. The plan then depends on the
        draw, which the theorem forbids and which costs adherence; False plans blind to the draw.
    record_bounds : bool
        Keep the bound of every decision in the statistics.

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

    sketch: str | Sketch = "rope_pair"
    epsilon: float = 0.05
    delta: float = 0.1
    shortlist: int = 128
    shrinkage: str = "binary"
    paper: bool = False
    record_bounds: bool = False

    def _check_options(self) -> None:
        super()._check_options()
        self._fetch_config()
        is_sketch = (
            hasattr(self.sketch, "build") and hasattr(self.sketch, "logits") and not isinstance(self.sketch, type)
        )
        if self.sketch not in ("rope_pair", "exact") and not is_sketch:
            raise ValueError(f"sketch must be 'rope_pair', 'exact' or a Sketch, got {self.sketch!r}")

    def _fetch_config(self) -> FetchConfig:
        return FetchConfig(self.epsilon, self.delta, self.shortlist, self.shrinkage, self.paper)

    def _sketch(self, model) -> Sketch:
        n_rotated = rotary_dim(model.config)
        if isinstance(self.sketch, RopePairSketch) and self.sketch.rotary_dim is None:
            return dataclasses.replace(self.sketch, rotary_dim=n_rotated)
        if not isinstance(self.sketch, str):
            return self.sketch
        rope_pair = RopePairSketch(rotary_dim=n_rotated)
        return rope_pair if self.sketch == "rope_pair" else ExactSketch(charged_as=rope_pair)

    def _new_stats(self) -> FetchStats:
        name = self.sketch if isinstance(self.sketch, str) else self.sketch.name
        config = self._fetch_config()
        return FetchStats(
            method=type(self).__name__,
            epsilon=config.epsilon,
            delta=config.delta,
            sketch=name,
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
