"""Writes docs/api.md from the docstrings of everything that is public.

    python scripts/write_api.py

tests/packaging/test_docs.py fails where the page is not what this script writes.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path

from flash_dmattn.masks.containers import Container

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

# Title, module, names. Of flash_dmattn and flash_dmattn.parallel all that they export, but for constants.
SECTIONS = (
    (
        "Attention",
        "flash_dmattn",
        (
            "flash_dmattn_func",
            "flash_dmattn_qkvpacked_func",
            "flash_dmattn_kvpacked_func",
            "flash_dmattn_varlen_func",
            "flash_dmattn_varlen_qkvpacked_func",
            "flash_dmattn_varlen_kvpacked_func",
            "flash_dmattn_with_kvcache",
            "merge_attention",
        ),
    ),
    (
        "Relative biases",
        "flash_dmattn.relative",
        ("t5", "alibi", "alibi_slopes", "kerple", "sandwich", "window", "dense"),
    ),
    ("Masks", "flash_dmattn", ("KeyIntervalMask", "KeyLists", "create_mask")),
    ("Pictures of masks", "flash_dmattn.visualize", ("plot",)),
    ("Padding", "flash_dmattn", ("unpad_input", "pad_input")),
    ("Backends", "flash_dmattn", ("flash_dmattn_func_auto", "get_available_backends")),
    ("Models of transformers", "flash_dmattn.integrations.transformers", ("register", "use_flash_dmattn")),
    ("Pair biases", "flash_dmattn.integrations.triangle", ("triangle_attention", "DS4Sci_EvoformerAttention")),
    ("Windows of images", "flash_dmattn.integrations.windows", ("window_attention",)),
    (
        "More than one GPU",
        "flash_dmattn.parallel",
        ("context_parallel_attention", "shard", "unshard", "positions", "count_traffic", "Traffic", "RankError"),
    ),
)

# Classes whose objects come from elsewhere: KeyLists.build, count_traffic.
NOT_CALLED = ("KeyLists", "Traffic")

TOP = """# API

Written from the docstrings by `scripts/write_api.py`. Formulas, precision and what is not supported:
[semantics.md](semantics.md).

`flash_dmattn.CUDA_AVAILABLE`, `TRITON_AVAILABLE` and `FLEX_AVAILABLE` say whether a backend can be used here.

Types in the signatures: `AnyMask` is a bool tensor, a `KeyIntervalMask`, `KeyLists` or None; `Sparse` is "auto",
"tiles" or "lists"; `Layout` is "contiguous" or "zigzag"; `Group` is a ProcessGroup, a DeviceMesh or None; `Sharded` is
a tensor or a `KeyIntervalMask`, and `ShardedMask` one of these or None; `Backend` is the name of a backend; `Model` is
an nn.Module.
"""

# In a docstring: sections of entries "name: what it is", which go on in lines that are indented further.
ENTRIES = ("Args:", "Attributes:", "Raises:")
HEADING = re.compile(r"^(Args|Attributes|Returns|Raises):$", re.MULTILINE)


def signature_of(name: str, function) -> str:
    """As it is written, a parameter a line where it is long."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    parts = [str(p.replace(annotation=p.empty, default=p.empty)) for p in parameters]
    for i, parameter in enumerate(parameters):
        if parameter.annotation is not parameter.empty:
            parts[i] += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            default = parameter.default
            parts[i] += " = " + (f'"{default}"' if isinstance(default, str) else repr(default))
    keyword_only = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if keyword_only and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        parts.insert(keyword_only[0], "*")
    result = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def entries(text: str) -> str:
    """A list of "name: what it is", or, of what is not of that form, the text."""
    items = re.split(r"\n(?=\S)", textwrap.dedent(text).strip("\n"))
    lines = []
    for item in items:
        first, colon, rest = " ".join(item.split()).partition(": ")
        names = ", ".join(f"`{name}`" for name in first.split(", "))
        lines.append(f"- {names}: {rest}" if colon else f"- {first}")
    return "\n".join(lines)


def described(docstring: str) -> str:
    """A docstring as Markdown."""
    before, *sections = HEADING.split(docstring)
    text = [before.strip()]
    for title, body in zip(sections[::2], sections[1::2]):
        # What stands unindented behind a section is text again.
        inside, *after = re.split(r"\n\n(?=\S)", body.strip("\n"), maxsplit=1)
        inside = entries(inside) if f"{title}:" in ENTRIES else textwrap.dedent(inside)
        text += [f"**{title}**", inside, *after]
    return "\n\n".join(text)


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def members_of(owner: type) -> list[str]:
    """Documents the members of a class that have a docstring: methods by their signature, properties by their name."""
    texts = []
    inherited = vars(Container) if issubclass(owner, Container) else {}
    for name, member in {**inherited, **vars(owner)}.items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        is_public = not name.startswith("_") or name in ("__and__", "__or__", "__getitem__")
        if not is_public or not inspect.isfunction(function) or not function.__doc__:
            continue
        code = name if isinstance(member, property) else signature_of(name, getattr(owner, name))
        code = re.sub(r"\(self(: Self)?(, |(?=\)))", "(", code)
        texts += [block(f"{owner.__name__}.{code}"), described(inspect.getdoc(function))]
    return texts


def entry(module: str, name: str) -> str:
    """What stands of one public name."""
    thing = getattr(importlib.import_module(module), name)
    is_class = inspect.isclass(thing)
    texts = [f"### {name}"]
    if not is_class or (inspect.isfunction(thing.__init__) and name not in NOT_CALLED):
        texts.append(block(signature_of(f"{module}.{name}", thing)))
    texts.append(described(inspect.getdoc(thing)))
    return "\n\n".join([*texts, *(members_of(thing) if is_class else [])])


def page() -> str:
    parts = [TOP.strip()]
    for title, module, names in SECTIONS:
        parts += [f"## {title}", *(entry(module, name) for name in names)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
