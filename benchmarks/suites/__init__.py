"""A file a suite. MODULES maps each suite to its module here and to one line about it."""

MODULES = {
    "equivalence": ("equivalence", "out, lse and every gradient of each backend against float64"),
    "dense": ("dense", "forward and backward, masks and biases made beforehand: SDPA, FlexAttention, cuDNN"),
    "relative": ("relative", "relative position biases with their gradient: none, dense, FlexAttention, SDPA"),
    "sparse": ("sparse", "top-k masks and keys named by indices, and the memory they take: FlexAttention, cuDNN"),
    "prefill": ("calls", "whole calls with window_size, the selection included: cuDNN over all keys, FlexAttention"),
    "decode": ("calls", "the same for one row: top-k by hand, SDPA over all keys"),
    "serving": ("serving", "decoding, chunks and mixed batches over a paged cache: top-k by hand, FlashAttention"),
    "host": ("calls", "host time of small calls: SDPA"),
    "selection": ("calls", "GPU time of top-k selection and key lists alone"),
    "small": ("small", "small calls on the CPU: SDPA"),
    "memory": ("memory", "peak memory of forward and backward"),
    "train": ("models", "training steps of transformers models, time and memory: SDPA, eager attention"),
    "attention": ("models", "T5's attention of one layer: SDPA, eager attention"),
    "generate": ("models", "tokens per second of model.generate: SDPA, eager attention"),
    "generate_batch": ("batches", "tokens per second of transformers' continuous batching: SDPA over all keys"),
    "triangle": ("triangle", "triangle attention: a plain batch, SDPA, cuEquivariance"),
    "parallel": (
        "parallel",
        "a sequence sharded over ranks, time and bytes sent: all-gather, PyTorch's ring",
    ),
}
