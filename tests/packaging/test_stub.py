"""flash_dmattn/_C.pyi matches the signatures that pybind11 writes into the docstrings of the compiled module."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import flash_dmattn
from flash_dmattn import ops

FOLDER = Path(flash_dmattn.__file__).parent

# Older and newer versions of pybind11 write the same types differently.
SPELLINGS = [
    (r"\b(flash_dmattn\._C|torch|typing|collections\.abc)\.", ""),
    (r"SupportsInt \| SupportsIndex|SupportsInt\b", "int"),
    (r"SupportsFloat \| SupportsIndex|SupportsFloat\b", "float"),
    (r"Optional\[(\w+)\]", r"\1 | None"),
    (r"\bTuple\[", "tuple["),
]


def signature(function: ast.FunctionDef, named: bool) -> tuple[list[str], str]:
    """The types of the arguments, with names and defaults where callers may use them, and that of the result."""
    arguments = [a for a in function.args.posonlyargs + function.args.args if a.arg != "self"]
    defaults = [""] * (len(arguments) - len(function.args.defaults)) + [
        f" = {ast.unparse(x)}" for x in function.args.defaults
    ]
    types = [
        f"{argument.arg}: {ast.unparse(argument.annotation)}{default}" if named else ast.unparse(argument.annotation)
        for argument, default in zip(arguments, defaults)
    ]
    return types, ast.unparse(function.returns)


def exported(function, named: bool = False) -> tuple[list[str], str]:
    line = inspect.getdoc(function).splitlines()[0]
    for pattern, spelling in SPELLINGS:
        line = re.sub(pattern, spelling, line)
    return signature(ast.parse(f"def {line}: ...").body[0], named)


@pytest.fixture(scope="module")
def stub():
    body = ast.parse((FOLDER / "_C.pyi").read_text()).body
    values = {node.target.id: node.annotation.id for node in body if isinstance(node, ast.AnnAssign)}
    return values | {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@pytest.fixture(scope="module")
def module():
    return ops.compiled_module()


def public(module) -> list[str]:
    return [name for name in dir(module) if not name.startswith("__")]


def test_the_package_is_typed():
    assert (FOLDER / "py.typed").exists()


def test_the_names(stub, module):
    assert sorted(stub) == sorted(public(module))


def test_the_functions(stub, module):
    functions = [name for name in public(module) if inspect.isbuiltin(getattr(module, name))]
    assert len(functions) > 10
    for name in functions:
        assert signature(stub[name], named=False) == exported(getattr(module, name)), name
        assert not stub[name].args.args, f"{name}: pybind11 knows no names of its arguments"
        said = " ".join(inspect.getdoc(getattr(module, name)).split("\n\n", 1)[1].split())
        if name != "build_info":  # of which the stub says more
            assert " ".join(ast.get_docstring(stub[name]).split()) == said


def test_the_values(stub, module):
    values = [name for name in public(module) if not callable(getattr(module, name))]
    assert {name: stub[name] for name in values} == {name: type(getattr(module, name)).__name__ for name in values}


def test_what_the_stub_says_of_build_info(stub, module):
    said = set(re.findall(r"\w+", ast.get_docstring(stub["build_info"])))
    assert set(module.build_info()) <= said
