"""Compares out, lse and every gradient of every backend with float64: `run.py equivalence --direction backward`."""

import sys

from run import main

if __name__ == "__main__":
    sys.exit(main(["equivalence", "--direction=backward", *sys.argv[1:]]))
