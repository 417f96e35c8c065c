"""Is the backward right? Every gradient (of out and of lse) and both outputs of every backend against the float64
reference, over many configurations.

    python benchmarks/backward_equivalence.py                                 # every backend that runs here
    python benchmarks/backward_equivalence.py --backend cpu --dtype bfloat16 --config softcap --outputs
    TRITON_INTERPRET=1 python benchmarks/backward_equivalence.py --device cpu --backend triton

The exit status is 1 where a backend misses the tolerance, or where nothing was compared.
"""

import sys

from equivalence import backward_outputs, main

if __name__ == "__main__":
    sys.exit(main(backward_outputs, __doc__))
