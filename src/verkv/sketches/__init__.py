"""Key sketches: small stand-ins for all keys that score every token for a query. Torch only."""

from verkv.sketches.base import Sketch
from verkv.sketches.exact import ExactSketch
from verkv.sketches.rope_pair import RopePairSketch
from verkv.sketches.shortlist import shortlist

__all__ = ["ExactSketch", "RopePairSketch", "Sketch", "shortlist"]
