"""Times the forward beside its peers: `run.py dense --direction forward`."""

import sys

from run import main

if __name__ == "__main__":
    sys.exit(main(["dense", "--direction=forward", *sys.argv[1:]]))
