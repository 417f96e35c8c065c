"""How fast is the backward, alone and together with the forward? Ours against SDPA and, on CUDA, FlexAttention.

    python benchmarks/backward_performance.py --plot backward.png
    python benchmarks/backward_performance.py --device cpu --workload "random mask" --check   # is it fast enough?
    python benchmarks/backward_performance.py --backend cuda --backend triton --json backward.json

The exit status is 1 where ours cannot do a workload, or where it is slower than --check allows.
"""

import sys

from performance import BACKWARD, BOTH, main

if __name__ == "__main__":
    sys.exit(main([BOTH, BACKWARD], __doc__))
