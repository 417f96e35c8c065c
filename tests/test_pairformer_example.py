"""examples/pairformer.py: it learns, alike with flash_dmattn and in plain PyTorch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for package in ("rich", "matplotlib"):
    pytest.importorskip(package)

SCRIPT = Path(__file__).parents[1] / "examples" / "pairformer.py"
TINY = {"batch_size": 2, "length": 12, "channels": 16, "heads": 2, "blocks": 1}


@pytest.fixture(scope="module")
def pairformer():
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("pairformer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pairformer"] = module  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    del sys.modules["pairformer"]


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
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    command = [sys.executable, str(SCRIPT), *arguments, "--steps=3", f"--plot={plot}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ms a step") == 2 and "the losses of a step differ by" in done.stdout
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
        pairformer.main([f"--{name.replace('_', '-')}={value}" for name, value in (TINY | options).items()])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
