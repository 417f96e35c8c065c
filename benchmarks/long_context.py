"""What does attention to 2048 of a million keys take? The dynamic mask, its lists of keys, forward, backward, memory.

    python benchmarks/long_context.py --device cuda --json long.json
    python benchmarks/long_context.py --device cpu --seqlen 16384 --window 512 --dtype float32

Every row sees, of the keys up to its own, the `window` of largest bias: causal, one bias for each key and key/value
head, whose gradient the backward gives. `topk` makes the mask, beforehand; the lists of keys are built in the forward,
and `key lists` says what of it they take.
"""

import sys
from dataclasses import asdict
from functools import partial

from report import add_common, argument_parser, console, describe, environment, parse, positive, write_json
from sparse import add_sparse_argument, measure, ours, show, top_w


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where the backend refused."""
    parser = argument_parser(__doc__, backends="the device's kernels")
    parser.add_argument("--seqlen", type=positive, default=2**20, help="rows and keys (default: %(default)s)")
    parser.add_argument("--window", type=positive, default=2048, help="keys that a row sees (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=1, help="(default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=8, help="of the query (default: %(default)s)")
    parser.add_argument("--kv-heads", type=positive, default=2, help="of key and value (default: %(default)s)")
    parser.add_argument("--head-dim", type=positive, default=64, help="(default: %(default)s)")
    add_common(parser, dtype={"default": "bfloat16", "help": "(default: %(default)s)"}, samples={})
    add_sparse_argument(parser)
    options = parse(parser, arguments)
    if options.heads % options.kv_heads:
        parser.error(f"--heads ({options.heads}) must be a multiple of --kv-heads ({options.kv_heads})")
    names = options.backend or [options.device]
    batch, seqlen, window, heads = options.batch, options.seqlen, options.window, options.heads
    name = f"B{batch} H{heads}/{options.kv_heads} S{seqlen} D{options.head_dim} w{window}"
    problem = top_w(name, seqlen, window, heads, options.kv_heads, options.head_dim, batch=batch)

    on, where = console(), environment(options.device)
    on.print(describe(where), highlight=False)
    builders = {name: partial(ours, name, options.sparse) for name in names}
    with on.status(problem.name):
        timings, memories = measure(problem, options.dtype, builders, options.seed, options.samples, options.device)
    show(on, timings, memories, names, peers=[])
    if options.json:
        results = {"timings": list(map(asdict, timings)), "memory": list(map(asdict, memories))}
        write_json(options.json, where, workload=problem.name, sparse=options.sparse, seed=options.seed, **results)
    return 1 if any(timing.refusal for timing in timings) else 0


if __name__ == "__main__":
    sys.exit(main())
