"""Compares out and lse of every backend with float64: `run.py equivalence --direction forward`."""

import sys

from run import main

if __name__ == "__main__":
    sys.exit(main(["equivalence", "--direction=forward", *sys.argv[1:]]))
