"""How fast is the forward? Ours against SDPA and, on CUDA, FlexAttention.

    python benchmarks/forward_performance.py --plot forward.png
    python benchmarks/forward_performance.py --device cpu --workload "random mask" --check   # is it fast enough?
    python benchmarks/forward_performance.py --backend cuda --backend triton --json forward.json

The exit status is 1 where ours cannot do a workload, or where it is slower than --check allows.
"""

import sys

from performance import FORWARD, main

if __name__ == "__main__":
    sys.exit(main([FORWARD], __doc__))
