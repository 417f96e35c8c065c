"""The scripts of benchmarks/ and examples/, as modules and as commands."""

import contextlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def importable(folder):
    """A context in which scripts of the folder import each other."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT / folder))


def module_of(script):
    """The module of a script such as "examples/doge.py"."""
    folder, name = script.removesuffix(".py").split("/")
    with importable(folder):
        return importlib.import_module(name)


def command_line(**options):
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def run_script(script, *arguments, timeout=180):
    """Runs a script as a command; returns the subprocess.CompletedProcess with its output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=timeout)
