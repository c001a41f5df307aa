"""The mathematics of VerKV: pure functions of tensors, torch only, tokens on the last axis.

Each module is one section of the paper (arXiv:2611.11319v1): `sampling` (Eq. 3, Algorithm 1), `shrinkage`
(Definition 2, Theorem 1, A.2), `denominator` (Eq. 5), `certificate` (Eq. 7, Lemma 1) and `fetching` (Eqs. 8-10,
Theorem 2). They are sort-based and exact: the reference every faster version is tested against.
"""

from verkv.estimators.certificate import Certificate, bernstein_certificate
from verkv.estimators.denominator import horvitz_thompson, shrinkage_estimate
from verkv.estimators.fetching import FetchPlan, certificate_drop, fetch_plan
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
    "Certificate",
    "FetchPlan",
    "bernstein_certificate",
    "binary_shrinkage",
    "certificate_drop",
    "decode_inclusion_probs",
    "defensive_mixture",
    "fetch_plan",
    "horvitz_thompson",
    "inclusion_probabilities",
    "mean_squared_error",
    "optimal_shrinkage",
    "poisson_sample",
    "quantize_inclusion_probs",
    "shrinkage_estimate",
]
