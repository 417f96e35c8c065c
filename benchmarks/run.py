"""Measures a suite of workloads, or draws what was measured.

    python benchmarks/run.py SUITE --help
    python benchmarks/run.py SUITE --device cuda --workload TEXT --json FILE --check
    python benchmarks/run.py SUITE --device cuda --update benchmarks/results/h200.json
    python benchmarks/run.py draw benchmarks/results/h200.json --to figures.svg

Suites:
"""

import importlib
import sys

import frame
from suites import MODULES


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(__doc__ + "".join(f"    {suite:15} {about}\n" for suite, (_, about) in MODULES.items()))
        return 0
    if name == "draw":
        return importlib.import_module("draw").main(rest)
    if name not in MODULES:
        print(f"there is no suite {name!r}; there are {', '.join(MODULES)}, and draw", file=sys.stderr)
        return 2
    module = importlib.import_module(f"suites.{MODULES[name][0]}")
    return module.main(rest) if name == "equivalence" else frame.main(module.SUITES[name], rest)


if __name__ == "__main__":
    sys.exit(main())
