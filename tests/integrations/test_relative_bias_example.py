"""examples/relative_bias.py: it learns, and the bias shows where it looks."""

import pytest
from programs import command_line, module_of, run_script

for package in ("rich", "matplotlib"):
    pytest.importorskip(package)

SCRIPT = "examples/relative_bias.py"
TINY = {"batch_size": 8, "size": 36, "width": 32, "heads": 2}


@pytest.fixture(scope="module")
def example():
    return module_of(SCRIPT)


@pytest.mark.parametrize("kind", ["sequence", "image"])
def test_the_bias_is_largest_where_the_answer_stands(example, kind):
    config = example.Config(**TINY, kind=kind, steps=150)
    model = example.build_model(config)
    losses = list(example.training_steps(model, config))
    assert losses[0] > 2.5 and losses[-1] < 0.5
    best = example.learned_bias(model).flatten(1).max(dim=0).values.argmax().item()
    if kind == "sequence":
        assert best - example.MAX_DISTANCE == -config.lag
    else:
        offsets = 2 * config.side - 1
        middle = config.side - 1
        assert divmod(best, offsets) == (middle - example.ABOVE, middle - example.LEFT)


@pytest.mark.parametrize("kind", ["sequence", "image"])
def test_command(tmp_path, kind):
    plot = tmp_path / "bias.png"
    done = run_script(SCRIPT, *command_line(**TINY, steps=3, kind=kind, plot=plot))
    assert done.returncode == 0, done.stderr
    assert f"{kind}: loss" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 15}, "multiple of heads"),
        ({"lag": 0}, "lag must be from 1"),
        ({"kind": "image", "size": 8}, "size must be at least 9 for images"),
        ({"steps": 0}, "steps must be positive"),
    ],
)
def test_bad_arguments_end_with_a_message(example, capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        example.main(command_line(**TINY | options))
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
