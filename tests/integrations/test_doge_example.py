"""examples/doge.py: both attentions learn alike, ours takes less memory, and what it learned is generated from."""

from pathlib import Path

import pytest
import torch
from programs import command_line, importable, module_of, run_script

for package in ("rich", "matplotlib", "transformers"):
    pytest.importorskip(package)

SCRIPT = "examples/doge.py"
TINY = {"batch_size": 2, "seq_len": 64, "window": 8, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module")
def doge():
    with importable("examples"):  # for the processes that it starts, too
        yield module_of(SCRIPT)


def losses(doge, config, implementation):
    training, _ = doge.load_text(config)
    return [step.loss for step in doge.training_steps(doge.build_model(config, implementation), config, training)]


def test_both_attentions_learn_alike(doge, tmp_path):
    """No byte comes twice in a sequence: in the first layer equal bytes have equal biases, and eager's choice between
    these is any."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    config = doge.Config(**TINY, steps=6, text=str(text))
    ours, eager = (losses(doge, config, implementation) for implementation in doge.IMPLEMENTATIONS)
    assert len(ours) == 6 and ours[-1] < ours[0]
    assert ours == pytest.approx(eager, rel=1e-3)


def test_the_loss_falls(doge):
    curve = losses(doge, doge.Config(**TINY, steps=30), doge.OURS)
    assert sum(curve[-5:]) / 5 < curve[0] - 1.5


def test_what_is_generated_begins_with_the_prompt(doge):
    config = doge.Config(**TINY)
    prompts = torch.randint(256, (2, 12))
    tokens = doge.generate(doge.build_model(config, doge.OURS), config, prompts)
    assert tokens.shape == (2, 12 + doge.CONTINUATION) and torch.equal(tokens[:, :12], prompts)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_eager_keeps_the_scores_of_each_layer_and_ours_of_none(doge):
    config = doge.Config(**TINY | {"seq_len": 2048})
    scores = config.batch_size * config.heads * config.seq_len**2 * 4 / doge.MIB  # of one layer, in float32
    mib = doge.peaks(config)
    assert len(mib[doge.OURS]) == len(mib[doge.EAGER]) == 3
    assert mib[doge.EAGER][-1] > config.layers * scores
    assert 0 < mib[doge.OURS][-1] < 0.6 * scores


@pytest.mark.long
def test_command(tmp_path):
    plot = tmp_path / "doge.png"
    done = run_script(SCRIPT, *command_line(**TINY, steps=3, samples=2, plot=plot))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens/s") == 2 and done.stdout.count(" sample ") == 2
    assert "MiB at 64" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "multiple of kv_heads"),
        ({"hidden": 36}, "multiple of 2 * heads"),
        ({"steps": 0}, "steps must be positive"),
        ({"only": "fast"}, "invalid choice: 'fast'"),
        ({"plot": "no/such/folder/doge.png"}, "no folder no/such/folder"),
        ({"text": "no/such/file.txt"}, "no/such/file.txt"),
    ],
)
def test_bad_arguments_end_with_a_message(doge, capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        doge.main(command_line(**TINY | options))
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
