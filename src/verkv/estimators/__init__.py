"""The mathematics of VerKV: pure functions of tensors, torch only, tokens on the last axis.

Each module is one section of the paper (arXiv:2611.11319v1): `sampling` (Eq. 3, Algorithm 1), `shrinkage`
(Definition 2, Theorem 1, A.2), `denominator` (Eq. 5), `certificate` (Eq. 7, Lemma 1) and `fetching` (Eqs. 8-10,
Theorem 2). They are sort-based and exact: the reference every faster version is tested against.

Five modules go beyond it: `thinning` (a smaller budget without a new draw), `distances` and `output_bound` (a
certificate of the attention output), `chernoff` (a tighter certificate) and `calibration` (a tolerance from queries
whose exact answer is known); see ``docs/segments.md`` for the first and ``docs/output_bound.md`` for the others.
"""

from verkv.estimators.calibration import (
    CalibratedTolerance,
    calibrated_tolerance,
    monotone_losses,
    required_queries,
    tolerance_grid,
)
from verkv.estimators.certificate import Certificate, bernstein_certificate
from verkv.estimators.chernoff import chernoff_bound, chernoff_fetch_plan
from verkv.estimators.denominator import horvitz_thompson, shrinkage_estimate
from verkv.estimators.distances import NormCodes, decode_norms, encode_norms, value_distances, value_norms
from verkv.estimators.fetching import FetchPlan, certificate_drop, fetch_plan
from verkv.estimators.linear_plan import LinearPlan, linear_plan
from verkv.estimators.output_bound import (
    OutputCertificate,
    OutputFetchPlan,
    output_certificate,
    output_fetch_plan,
    relative_output_bound,
)
from verkv.estimators.sampling import (
    MIN_INCLUSION_PROB,
    decode_inclusion_probs,
    defensive_mixture,
    inclusion_probabilities,
    poisson_sample,
    quantize_inclusion_probs,
)
from verkv.estimators.shrinkage import binary_shrinkage, mean_squared_error, optimal_shrinkage

__all__ = [
    "MIN_INCLUSION_PROB",
    "CalibratedTolerance",
    "Certificate",
    "FetchPlan",
    "LinearPlan",
    "NormCodes",
    "OutputCertificate",
    "OutputFetchPlan",
    "bernstein_certificate",
    "binary_shrinkage",
    "calibrated_tolerance",
    "certificate_drop",
    "chernoff_bound",
    "chernoff_fetch_plan",
    "decode_inclusion_probs",
    "decode_norms",
    "defensive_mixture",
    "encode_norms",
    "fetch_plan",
    "horvitz_thompson",
    "inclusion_probabilities",
    "linear_plan",
    "mean_squared_error",
    "monotone_losses",
    "optimal_shrinkage",
    "output_certificate",
    "output_fetch_plan",
    "poisson_sample",
    "quantize_inclusion_probs",
    "relative_output_bound",
    "required_queries",
    "shrinkage_estimate",
    "tolerance_grid",
    "value_distances",
    "value_norms",
]
