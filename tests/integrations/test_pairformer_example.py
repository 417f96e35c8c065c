"""examples/pairformer.py: it learns, alike with flash_dmattn and in plain PyTorch."""

import pytest
import torch
from programs import command_line, module_of, run_script

for package in ("rich", "matplotlib"):
    pytest.importorskip(package)

SCRIPT = "examples/pairformer.py"
TINY = {"batch_size": 2, "length": 12, "channels": 16, "heads": 2, "blocks": 1}


@pytest.fixture(scope="module")
def pairformer():
    return module_of(SCRIPT)


def losses(pairformer, config, implementation):
    return [step.loss for step in pairformer.training_steps(pairformer.build_model(config, implementation), config)]


def test_both_attentions_learn_alike(pairformer):
    config = pairformer.Config(**TINY, steps=8)
    ours, eager = (losses(pairformer, config, implementation) for implementation in pairformer.IMPLEMENTATIONS)
    assert len(ours) == 8
    assert ours == pytest.approx(eager, rel=1e-4)


def test_the_loss_falls(pairformer):
    curve = losses(pairformer, pairformer.Config(**TINY, steps=60, lr=1e-2), pairformer.OURS)
    assert sum(curve[-5:]) / 5 < curve[0] - 0.5


def test_padding_is_not_seen(pairformer):
    """What lies beyond the end of a chain reaches no pair of it."""
    config = pairformer.Config(**TINY)
    model = pairformer.build_model(config, pairformer.OURS)
    chains = pairformer.random_chains(config, torch.Generator().manual_seed(1))
    chains.exists[0, 7:] = False
    logits = model(chains)[0, :7, :7]
    chains.distances[0, 7:] = 5.0
    chains.observed[0, 7:] ^= True
    torch.testing.assert_close(model(chains)[0, :7, :7], logits)


def test_command(tmp_path):
    plot = tmp_path / "pairformer.png"
    done = run_script(SCRIPT, *command_line(**TINY, steps=3, plot=plot))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ms per step") == 2 and "the losses of a step differ by" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 15}, "multiple of heads"),
        ({"observed": 1.0}, "observed must be from 0 to less than 1"),
        ({"length": 3}, "length must be at least 4"),
        ({"steps": 0}, "steps must be positive"),
        ({"only": "fast"}, "invalid choice: 'fast'"),
        ({"plot": "no/such/folder/plot.png"}, "no folder no/such/folder"),
    ],
)
def test_bad_arguments_end_with_a_message(pairformer, capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        pairformer.main(command_line(**TINY | options))
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
