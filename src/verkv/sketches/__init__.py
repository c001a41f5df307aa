"""Key sketches: small stand-ins for all keys that score every token for a query. Torch only."""

from verkv.sketches.base import Sketch
from verkv.sketches.exact import ExactSketch
from verkv.sketches.key_basis import KeyBasis, fit_key_basis, load_key_bases, save_key_bases
from verkv.sketches.page_minmax import PageMinMaxSketch
from verkv.sketches.product_quantization import ProductQuantizationSketch
from verkv.sketches.query_pca import QueryPCASketch
from verkv.sketches.rope_pair import RopePairSketch
from verkv.sketches.shortlist import shortlist
from verkv.sketches.transform import TransformSketch

__all__ = [
    "ExactSketch",
    "KeyBasis",
    "PageMinMaxSketch",
    "ProductQuantizationSketch",
    "QueryPCASketch",
    "RopePairSketch",
    "Sketch",
    "TransformSketch",
    "fit_key_basis",
    "load_key_bases",
    "save_key_bases",
    "shortlist",
]
