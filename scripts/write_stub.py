"""Writes flash_dmattn/interface.pyi: the public functions for type checkers, with an overload for each kind of result.

    python scripts/write_stub.py

tests/packaging/test_typing.py fails where the file is not what this script writes.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

from flash_dmattn import interface

STUB = Path(__file__).parent.parent / "flash_dmattn" / "interface.pyi"
FUNCTIONS = [name for name in vars(interface) if name.startswith("flash_dmattn_") and name != "flash_dmattn_func_auto"]

TOP = """# Written by scripts/write_stub.py from the signatures in interface.py.
# fmt: off
from typing import Literal, Protocol, overload

from torch import Tensor

from .backends import Backend
from .checks import AnyMask
from .masks.choice import Sparse
"""

NO, YES = "Literal[False]", "Literal[True]"
# The result, and the types of return_attn_probs and return_lse. True has no default, so it must be passed: by name.
RESULTS = (
    ("Tensor", f"{NO} | None", NO),
    ("tuple[Tensor, Tensor]", f"{NO} | None", YES),
    ("tuple[Tensor, Tensor, Tensor]", YES, "bool"),
    ("Tensor | tuple[Tensor, ...]", "bool | None", "bool"),
)
# The overloads of a function without return_attn_probs.
RESULTS_OR_LSE = (
    ("Tensor", "", NO),
    ("tuple[Tensor, Tensor]", "", YES),
    ("Tensor | tuple[Tensor, Tensor]", "", "bool"),
)


def overload_of(name: str, function, result: str, probs: str, lse: str, owner: str = "") -> str:
    types = {"return_attn_probs": probs, "return_lse": lse}
    positional, by_name = [owner] if owner else [], []
    for parameter in inspect.signature(function).parameters.values():
        kind = types.get(parameter.name, parameter.annotation)
        has_default = parameter.default is not parameter.empty and kind != YES
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY and kind != YES
        text = f"{parameter.name}: {kind}{' = ...' if has_default else ''}"
        (positional if is_positional else by_name).append(text)
    parameters = [text.replace(" ", "\0") for text in (*positional, "*", *by_name)]  # lines end between parameters
    arguments = textwrap.fill(", ".join(parameters), 110).replace("\0", " ")
    return f"@overload\ndef {name}(\n{textwrap.indent(arguments, '    ')},\n) -> {result}: ..."


def stub() -> str:
    parts = [TOP.rstrip()]
    for name in FUNCTIONS:
        function = getattr(interface, name)
        has_probs = "return_attn_probs" in inspect.signature(function).parameters
        parts += [overload_of(name, function, *results) for results in (RESULTS if has_probs else RESULTS_OR_LSE)]
    calls = [overload_of("__call__", interface.flash_dmattn_func, *results, "self") for results in RESULTS]
    parts.append("class FlashDmattnFunc(Protocol):\n" + textwrap.indent("\n".join(calls), "    "))
    parts.append("def flash_dmattn_func_auto(backend: Backend | None = ...) -> FlashDmattnFunc: ...")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub())
