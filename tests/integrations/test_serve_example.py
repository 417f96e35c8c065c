"""examples/serve.py: requests share steps and pages, and get the tokens that they get alone."""

import pytest
import torch
from programs import command_line, module_of

for package in ("rich", "matplotlib"):
    pytest.importorskip(package)

SCRIPT = "examples/serve.py"
TINY = {"requests": 7, "batch": 3, "rows": 20, "pages": 9, "prompt": 60, "new_tokens": 8, "window": 12, "dim": 32}


@pytest.fixture(scope="module")
def example():
    return module_of(SCRIPT)


@pytest.fixture
def served(example):
    def serve(**options):
        config = example.Config(**TINY | options)
        requests, model = example.make_requests(config), example.build_model(config)
        steps, pages = [], {}
        for step in example.serve(example.Server(model, config), requests, config):
            steps.append(step)
            pages |= {request.number: list(request.pages) for request in [*step.active, *step.done]}
        return model, requests, steps, pages

    return serve


@pytest.mark.parametrize("options", [{}, {"page_size": 32, "arrivals": 0.3}, {"kv_heads": 1, "batch": 1}], ids=str)
def test_tokens_are_those_of_each_request_alone(example, served, options):
    model, requests, steps, pages = served(**options)
    for request in requests:
        assert request.tokens == example.generate_alone(model, request, "cpu")
        assert len(request.tokens) == request.wanted and request.cached == len(request.prompt) + request.wanted - 1
    used = [page for one in pages.values() for page in one]
    assert max(used.count(page) for page in used) > 1
    last = steps[-1]
    assert last.new_tokens == sum(request.wanted for request in requests)
    assert last.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert last.pages_allocated == len(used) and max(step.pages_in_use for step in steps) <= TINY["pages"]


def test_steps_mix_prompts_and_single_tokens(example, served, monkeypatch):
    lengths, right = [], example.Server.forward

    def recorded(self, batch, max_rows):
        lengths.append(batch.cu_seqlens.diff().tolist())
        return right(self, batch, max_rows)

    monkeypatch.setattr(example.Server, "forward", recorded)
    served()
    assert any(1 in one and max(one) > 1 for one in lengths)
    assert max(map(sum, lengths)) == TINY["rows"] and max(map(len, lengths)) == TINY["batch"]


def test_the_check_finds_other_tokens(example, monkeypatch, capsys):
    arguments = command_line(**TINY)
    assert example.main(arguments) == 0
    assert "7 of 7 requests" in capsys.readouterr().out
    generate = example.generate_alone
    monkeypatch.setattr(example, "generate_alone", lambda *args: [*generate(*args), 0])
    assert example.main(arguments) == 1
    assert "0 of 7 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"page_size": 8}, "page_size must be from 16 to 256, got 8"),
        ({"pages": 4}, "pages must hold a request, 5, got 4"),
        ({"batch": 21}, "batch must be at most rows (20), got 21"),
        ({"kv_heads": 3}, "heads (4) must be a multiple of kv_heads"),
        ({"window": 0}, "window must be positive, got 0"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(example, capsys, options, says):
    with pytest.raises(SystemExit):
        example.main(command_line(**TINY | options))
    assert says in capsys.readouterr().err


@pytest.mark.gpu
def test_a_cuda_graph_gives_the_tokens_of_plain_calls(example, served, monkeypatch):
    options = {"device": "cuda", "dim": 128, "window": 16}
    replayed = [request.tokens for request in served(**options)[1]]
    monkeypatch.setattr(example.Server, "replay", lambda self, batch: self.forward(batch, 1))
    plain = [request.tokens for request in served(**options)[1]]
    assert replayed == plain
    torch.cuda.synchronize()
