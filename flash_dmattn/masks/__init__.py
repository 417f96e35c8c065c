"""Masks. Every kind is a `Mask` (base.py), from the public functions to the operators.

interval.py: one interval of rows per key; dense.py: bool tensors; lists.py: key lists, of a mask or of an indexer's
keys (indices.py); choice.py: tiles or lists; selection.py: the top-k mask of `window_size`; dynamic.py:
create_mask.
"""

from .base import Mask, Problem
from .choice import SPARSE
from .dense import BoolMask
from .dynamic import create_mask
from .interval import KeyIntervalMask
from .lists import KeyLists, as_mask

__all__ = ["SPARSE", "BoolMask", "KeyIntervalMask", "KeyLists", "Mask", "Problem", "as_mask", "create_mask"]
