"""torch.library.opcheck of the operators: schema, fakes, autograd registration."""

import pytest
import torch
from paths import case, cpu, cuda
from sequences import offsets

from flash_dmattn import ops
from flash_dmattn.backends.compiled import FIXED

# Shapes of mask and bias, with "Sq" and "Sk" for the lengths.
SHAPES = {
    "none": (None, None),
    "key": ((2, 1, 1, "Sk"), (1, 2, 1, "Sk")),
    "dense": ((2, 4, "Sq", "Sk"), (1, 4, "Sq", "Sk")),
    "dense of each batch element": ((1, 2, "Sq", "Sk"), (2, 4, "Sq", "Sk")),
}
RELATIVE = {"no relative bias": None, "relative bias": (1, 4, 9), "of each batch element": (2, 1, 41)}
CASES = [
    *(case(path, 5, 7, 8, dtype) for path in cpu("none") for dtype in (torch.float32, torch.bfloat16)),
    *(case(path, 70, 90, 64, torch.bfloat16) for path in cuda("none")),
]


@pytest.mark.parametrize("relative", RELATIVE)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("path, seqlen_q, seqlen_k, head_dim, dtype", CASES)
def test_attention(path, seqlen_q, seqlen_k, head_dim, dtype, shapes, relative):
    def sized(shape):
        return None if shape is None else [{"Sq": seqlen_q, "Sk": seqlen_k}.get(size, size) for size in shape]

    mask_shape, bias_shape = map(sized, SHAPES[shapes])
    query, key, value = (x.requires_grad_() for x in path.inputs(2, seqlen_q, seqlen_k, 4, 2, head_dim, dtype=dtype))
    mask = None if mask_shape is None else path.rand_mask(*mask_shape, visible=0.9)
    bias = None if bias_shape is None else path.randn(*bias_shape, dtype=dtype).requires_grad_()
    relative_bias = None
    if RELATIVE[relative] is not None:
        relative_bias = path.randn(*RELATIVE[relative], dtype=torch.float32).requires_grad_()
    packing = (mask, seqlen_q, seqlen_k, False, None, None)
    masks = ops.MaskTensors(mask)
    if path.on_cuda and mask is not None:
        torch.library.opcheck(ops.pack_mask, packing)
        masks = ops.MaskTensors(*ops.pack_mask(*packing))
    rounding = {"atol": 1e-2, "rtol": 1e-1} if path.on_cuda else {"atol": 1e-3, "rtol": 1e-2}
    options = (0.3, 0.0, True, False) if path.on_cpu else (0.3, 0.0, False, True)
    forward = (query, key, value, bias, relative_bias, *masks, *FIXED, None, *options)
    torch.library.opcheck(ops.attention_forward, forward, **rounding)

    tensors = [None if x is None else x.detach() for x in (query, key, value, bias, relative_bias)]
    out, lse = ops.attention_forward(*tensors, *masks, *FIXED, None, *options)
    gradients = torch.randn_like(out), torch.randn_like(lse)
    needed = bias is not None, relative_bias is not None
    backward = (*gradients, out, lse, *needed, *tensors, *masks, *FIXED, None, *options)
    torch.library.opcheck(ops.attention_backward, backward, **rounding)


@pytest.mark.parametrize("path", [case(path) for path in cpu("none")])
def test_attention_of_variable_length(path):
    cu = offsets([4, 5])
    query, key, value = (torch.randn(9, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(9, 2, 5, requires_grad=True)
    forward = (query, key, value, bias, None, *ops.MaskTensors(), cu, cu, 5, 5, None, 0.3, 0.0, False, False)
    torch.library.opcheck(ops.attention_forward, forward)


@pytest.mark.parametrize("path", [case(path) for path in cpu("none")])
def test_build_key_lists(path):
    mask = path.rand_mask(2, 2, 150, 70, visible=0.1)
    # All rows see every key: behind shorter lists the memory holds anything.
    intervals = torch.stack((torch.zeros(2, 2, 70), torch.full((2, 2, 70), 150))).int().to(path.device)
    for arguments in (
        (mask, None, 150, 70, True, None, None, None, None),
        (mask[:, :, :1], None, 150, 70, False, None, None, None, None),
        (None, intervals, 150, 70, False, None, None, 70, None),
        (None, intervals, 150, 70, False, None, None, None, None),
    ):
        torch.library.opcheck(ops.build_key_lists, arguments)


@pytest.mark.parametrize("path", [case(path) for path in cpu("none")])
@pytest.mark.parametrize("tile_rows", [1, 64, 96, 256])
def test_index_key_lists(path, tile_rows):
    # Every list is full: behind shorter lists the memory holds anything.
    indices = torch.arange(64, dtype=torch.int32).expand(2, 2, -(-300 // tile_rows), 64).contiguous()
    torch.library.opcheck(ops.index_key_lists, (indices, None, tile_rows, 300, 64, False, None, None))
    every_row = torch.stack((torch.zeros(1, 4, 64), torch.full((1, 4, 64), 300))).int()
    torch.library.opcheck(ops.index_key_lists, (indices, every_row, tile_rows, 300, 64, False, None, None))
    cu = offsets([300, 300])
    arguments = (indices, None, tile_rows, 300, 600, False, cu, cu)
    torch.library.opcheck(ops.index_key_lists, arguments, test_utils=("test_schema", "test_faketensor"))
