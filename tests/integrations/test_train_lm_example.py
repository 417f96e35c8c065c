"""examples/train_lm.py: the model learns, its bias is trained, and every backend gives the same loss curve."""

import pytest
import torch
from programs import command_line, module_of, run_script

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

SCRIPT = "examples/train_lm.py"
TINY = {"batch_size": 4, "seq_len": 32, "window": 8, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module")
def train_lm():
    return module_of(SCRIPT)


@pytest.fixture(autouse=True)
def keep_determinism_setting():
    enabled = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(enabled)


@pytest.fixture
def float64_weights():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_kernels_and_the_reference_give_the_same_losses(train_lm, float64_weights, tmp_path, kv_heads):
    """Where no rounding decides which keys a row keeps, and all that follows: no byte comes twice in a sequence,
    for in the first layer equal bytes have equal biases, and two biases are hardly ever nearly equal in float64.
    """
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    options = TINY | {"kv_heads": kv_heads, "steps": 8, "text": str(text)}
    kernels = train_lm.train(train_lm.Config(**options, backend="cpu"))
    reference = train_lm.train(train_lm.Config(**options, backend="reference"))
    assert len(kernels) == 8
    assert kernels == pytest.approx(reference, rel=1e-6)  # losses are float32


def test_the_default_backend_matches_the_device(train_lm):
    options = TINY | {"steps": 3, "deterministic": True}
    default, cpu = (train_lm.train(train_lm.Config(**options, backend=backend)) for backend in (None, "cpu"))
    assert default == cpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls(train_lm, dtype):
    losses = train_lm.train(train_lm.Config(**TINY, steps=30, dtype=dtype))
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_bias_is_trained(train_lm, backend):
    config = train_lm.Config(**TINY, backend=backend)
    training, _ = train_lm.load_text(config)
    model = train_lm.build_model(config)
    train_lm.loss_of(
        model, train_lm.random_batch(training, config, torch.Generator().manual_seed(0)), config
    ).backward()
    for block in model.blocks:
        for parameter in (block.attention.A, block.attention.dt_proj.weight):
            assert parameter.grad.isfinite().all()
            assert (parameter.grad != 0).all()


def test_rows_see_the_largest_biases_of_the_past(train_lm):
    config = train_lm.Config(**TINY, backend="reference")
    attention = train_lm.build_model(config).blocks[0].attention
    seen = {}

    def spy(*tensors, attn_bias, **options):
        out, _, probs = reference(*tensors, attn_bias=attn_bias, **options, return_attn_probs=True)
        seen.update(bias=attn_bias.repeat_interleave(2, dim=1), probs=probs)
        return out

    reference, attention.attention = attention.attention, spy
    attention(torch.randn(3, 20, 32), torch.ones(20, 1, 4), torch.zeros(20, 1, 4))
    for row in range(20):
        past = seen["bias"][:, :, 0, : row + 1]
        kept = past >= past.sort(dim=-1, descending=True).values[..., : config.window][..., -1:]
        assert torch.equal(seen["probs"][:, :, row, : row + 1] > 0, kept)
        assert not seen["probs"][:, :, row, row + 1 :].any()


def test_the_model_sees_no_future(train_lm):
    model = train_lm.build_model(train_lm.Config(**TINY))
    tokens = torch.randint(256, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = torch.randint(256, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :20], model(changed)[:, :20])


def test_command(tmp_path):
    text, plot = tmp_path / "text.txt", tmp_path / "loss.png"
    text.write_bytes("Größe, [/b] markup and a tab\t\n".encode() * 40)
    done = run_script(SCRIPT, *command_line(**TINY, text=text, steps=3, samples=2, plot=plot))
    assert done.returncode == 0, done.stderr
    assert "validation" in done.stdout
    assert "tokens/s" in done.stdout
    assert done.stdout.count(" sample ") == 2
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "no/such/file.txt"}, "no/such/file.txt"),
        ({"seq_len": 10**7}, "too short"),
        ({"heads": 4, "kv_heads": 3}, "multiple of kv_heads"),
        ({"dim": 36}, "multiple of 2 * heads"),
        ({"steps": 0}, "steps must be positive"),
        ({"window": -1}, "window must be positive"),
        ({"lr": "nan"}, "lr must be positive"),
        ({"samples": -1}, "samples must not be negative"),
        ({"device": "cpu", "backend": "cuda"}, "backend cuda does not run on device cpu"),
        ({"device": "cpu", "backend": "flex"}, "backend flex needs device cuda"),
        ({"backend": "fast"}, "invalid choice: 'fast'"),
        ({"plot": "no/such/folder/loss.png"}, "no folder no/such/folder"),
    ],
)
def test_bad_arguments_end_with_a_message(train_lm, capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        train_lm.main(command_line(**TINY | options))
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert message in error


def test_a_text_must_hold_a_sequence_in_its_tenth(train_lm, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * 329)
    with pytest.raises(ValueError, match="a tenth of its 329 bytes"):
        train_lm.load_text(train_lm.Config(**TINY, text=str(path)))
    path.write_bytes(b"x" * 330)
    training, validation = train_lm.load_text(train_lm.Config(**TINY, text=str(path)))
    assert (len(training), len(validation)) == (297, 33)
