"""scripts/performance_bars.py: every peer is drawn, the faster ones as plainly as the slower ones."""

import performance_bars
import pytest
from performance_bars import bars, comparisons, slower
from rows import Row
from suites import MODULES

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"


def row(name, direction, ms=None, *, suite="dense", workload="W <1>", limit=None, refusal=""):
    figures = {} if ms is None else {"seconds": ms / 1e3} | ({} if limit is None else {"fraction_of_limit": limit})
    return Row(suite, workload, "bfloat16", direction, name, figures, refusal)


ROWS = [
    row("flash_dmattn", FORWARD, 1.0, limit=0.5),
    row("flash_dmattn", BACKWARD, 3.0, limit=0.1),
    row("FlashAttention-4", FORWARD, 0.8, limit=0.6),
    row("FlashAttention-4", BACKWARD, 4.0, limit=0.2),
    row("SDPA: one way", FORWARD, 9.0),
    row("SDPA: another", FORWARD, 7.0),
    row("SDPA: another", BACKWARD, 9.0),
    row("FlexAttention", FORWARD, refusal="out of memory"),
    row("FlexAttention", BACKWARD, refusal="out of memory"),
    row("cuDNN", FORWARD, refusal="cuDNN is compared without mask and bias"),
    row("flash_dmattn, lists", FORWARD, 0.1),
    row("cuDNN, dense S x w", FORWARD, 0.1),
    row("triangle_attention", BOTH, 2.0, suite="triangle", workload="T"),
    row("cuEquivariance", BOTH, 5.0, suite="triangle", workload="T"),
    row("flash_dmattn", FORWARD, 1.0, workload="alone"),
]


def test_every_peer_of_a_workload():
    dense, triangle = comparisons(ROWS)
    assert (dense.direction, dense.ours.seconds) == ("forward and backward", pytest.approx(4e-3))
    assert dense.ours.limit == pytest.approx((0.5 * 1 + 0.1 * 3) / 4)  # weighted by time
    assert {peer.name: peer.seconds for peer in dense.peers} == {
        "FlashAttention-4": pytest.approx(4.8e-3),
        "SDPA": pytest.approx(16e-3),  # the fastest way in each direction
        "FlexAttention": None,
    }
    assert [peer.name for peer in triangle.peers] == ["cuEquivariance"]


def test_bars_are_as_long_as_the_times():
    dense, _ = comparisons(ROWS)
    text = bars(dense, "W <1>")
    assert "W &lt;1&gt;: forward and backward" in text
    assert 'class="bar ours"><span class="bar-name">flash_dmattn</span>' in text and "width: 25.0%" in text
    assert "16 ms · 4.00 x</span>" in text and "4.8 ms · 1.20 x · 27 % of the limit" in text
    assert "cannot: out of memory" in text and "faster" not in text


def test_a_faster_peer_is_marked():
    (one,) = comparisons([row("flash_dmattn", FORWARD, 2.0), row("cuDNN", FORWARD, 1.0)])
    assert 'class="bar faster"><span class="bar-name">cuDNN</span>' in bars(one, "W")
    assert "1 ms · 0.50 x, faster" in bars(one, "W")


def test_the_table_of_faster_peers_takes_each_direction():
    """FlashAttention-4 is faster in the forward alone."""
    lines = slower(ROWS).splitlines()[2:]
    assert lines == ["| dense: W <1> | forward | 1 ms | 0.8 ms | FlashAttention-4, 0.80 of the time |"]


def test_every_suite_with_peers_is_known():
    assert set(performance_bars.SUITES) <= set(MODULES)
