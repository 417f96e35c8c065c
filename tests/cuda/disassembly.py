"""The machine code of a kernel: its instructions and its loops."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    address: int
    predicated: bool
    text: str  # without its predicate

    @property
    def name(self) -> str:
        return self.text.split()[0].split(".")[0]


def find_cuobjdump() -> str | None:
    """The path of cuobjdump in CUDA_HOME, PATH, /usr/local or Triton's package."""
    home, triton = os.environ.get("CUDA_HOME"), importlib.util.find_spec("triton")
    folders = [Path(home, "bin")] if home else []
    on_path = shutil.which("cuobjdump")
    folders += [Path(on_path).parent] if on_path else []
    folders += sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    folders += [Path(triton.origin).parent / "backends/nvidia/bin"] if triton and triton.origin else []
    # It calls nvdisasm from the same folder.
    found = (folder for folder in folders if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists())
    return next((str(folder / "cuobjdump") for folder in found), None)


def disassembled(cuobjdump: str, cubin: Path) -> dict[str, list[Instruction]]:
    """The instructions of each kernel of a cubin, by its mangled name."""
    path = f"{Path(cuobjdump).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    )
    functions = re.split(r"^\s*Function : (\S+)$", done.stdout, flags=re.MULTILINE)
    line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([^;]*?)\s*;")
    return {
        name: [Instruction(int(address, 16), bool(predicate), text) for address, predicate, text in line.findall(text)]
        for name, text in zip(functions[1::2], functions[2::2])
    }


def successors(code: list[Instruction]) -> list[list[int]]:
    """For each instruction the indices in `code` that may follow it. A call returns."""
    places = {instruction.address: place for place, instruction in enumerate(code)}
    following = []
    for place, (_, predicated, text) in enumerate(code):
        name, *operands = text.split()
        name = name.split(".")[0]
        conditional = predicated or (name == "BRA" and len(operands) > 1)  # BRA P3, 0x40
        ends = name in ("BRA", "EXIT", "RET") and not conditional
        after = [] if ends or place + 1 == len(code) else [place + 1]
        if name == "BRA":
            after.append(places[int(operands[-1].strip("`()"), 16)])
        following.append(after)
    return following


def cycles(nodes: set[int], following: list[list[int]]) -> list[set[int]]:
    """The strongly connected components of more than one of `nodes` (Tarjan's algorithm, without recursion)."""
    number, low, on_stack, stack, found = {}, {}, set(), [], []
    for root in sorted(nodes):
        if root in number:
            continue
        work = [(root, iter(following[root]))]
        while work:
            node, left = work[-1]
            if node not in number:
                number[node] = low[node] = len(number)
                stack.append(node)
                on_stack.add(node)
            for after in left:
                if after in nodes and after not in number:
                    work.append((after, iter(following[after])))
                    break
                if after in on_stack:
                    low[node] = min(low[node], number[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    at = stack.index(node)
                    component, stack[at:] = set(stack[at:]), []
                    on_stack -= component
                    if len(component) > 1:
                        found.append(component)
    return found


def inner_loops(code: list[Instruction], name: str) -> list[list[Instruction]]:
    """The loops that hold an instruction of that name and no smaller loop that does, branches away from them and back
    included."""
    following = successors(code)

    def inner(nodes: set[int]) -> list[set[int]]:
        found = []
        for loop in cycles(nodes, following):
            if not any(code[place].name == name for place in loop):
                continue
            # Without the place where it is entered, what is left of a loop is the loops inside it.
            entered = {after for place in nodes - loop for after in following[place] if after in loop}
            found += inner(loop - (entered or {min(loop)})) or [loop]
        return found

    return [[code[place] for place in sorted(loop)] for loop in inner(set(range(len(code))))]
