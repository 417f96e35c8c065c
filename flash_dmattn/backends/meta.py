"""The compiled operators on meta tensors: shapes and dtypes of the results, without values."""

from __future__ import annotations

from .compiled import attention_on

NAME = "meta"
SPARSE_MASKS = True
attention = attention_on("meta")
