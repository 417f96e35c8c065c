"""Times the backward, alone and with the forward, beside its peers: `run.py dense --direction backward`."""

import sys

from run import main

if __name__ == "__main__":
    sys.exit(main(["dense", "--direction=backward", *sys.argv[1:]]))
