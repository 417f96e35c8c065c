"""Tokens per second of transformers' continuous batching: model.generate_batch, greedy, prompts included.

Prompts have random tokens and lengths. Every implementation serves them once before the call that is timed, with the
same manager: CUDA graphs are captured then, and no pages are shared. "SDPA, all keys" is the same model without its
dynamic mask: transformers makes Doge's mask from the tokens of a step alone, so that Doge itself runs with flash_dmattn
only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from frame import Demand, Setting, Suite
from peers import DENSE, OURS
from rows import Row
from torch import Tensor
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.models.doge import modeling_doge

from flash_dmattn.integrations.versions import CACHE
from suites.models import Workload, measure, model_of, seconds_of, start, use

SERVED = "served token"
PAGE_SIZE = 256
IMPLEMENTATIONS = (OURS, DENSE)


@dataclass(frozen=True)
class Requests:
    """Requests whose prompts have at least `shortest` and at most `model.seqlen_k` tokens."""

    model: Workload
    requests: int
    shortest: int
    new_tokens: int
    rows: int = 2048  # in a step, at most

    @property
    def name(self) -> str:
        return self.model.name

    def shrunk(self, by: int) -> Requests:
        sizes = {name: max(2, getattr(self, name) // by) for name in ("requests", "shortest", "new_tokens", "rows")}
        return replace(self, model=self.model.shrunk(by), **sizes)

    def prompts(self, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(self.shortest, self.model.seqlen_k + 1, (self.requests,), generator=generator)
        return [torch.randint(3, self.model.vocabulary, (n,), generator=generator).tolist() for n in lengths.tolist()]

    def config(self) -> ContinuousBatchingConfig:
        """Pages for all requests at once."""
        pages = self.requests * (math.ceil((self.model.seqlen_k + self.new_tokens) / PAGE_SIZE) + 1)
        config = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=self.rows, allow_block_sharing=False)
        setattr(config, "page_size" if hasattr(config, "page_size") else "block_size", PAGE_SIZE)  # before 5.18
        config.auto_switch_to_flash = False  # since 5.20
        return config


WORKLOADS = [
    Requests(
        Workload("Doge, 4 layers, 64 requests of 2000 to 8000 tokens, 256 new", "doge", 8000, window=2048),
        *(64, 2000, 256),
    ),
]
DEMANDS = [Demand("Doge", SERVED, 1 / 2, (DENSE,))]


class DenseDogeAttention(modeling_doge.DogeAttention):
    """DogeAttention without its dynamic mask."""

    def forward(self, hidden_states: Tensor, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = modeling_doge.apply_rotary_pos_emb(query, key, *position_embeddings)
        if CACHE == "cache":  # transformers 5.24 and newer: here, and before in the attention function
            key, value = kwargs.pop(CACHE).update(key, value, self.layer_idx, kwargs=kwargs)
        attention = AttentionInterface().get_interface(self.config._attn_implementation, None)
        out, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2)), None


def with_all_keys(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, modeling_doge.DogeAttention):
            module.__class__ = DenseDogeAttention
    model.set_attn_implementation("sdpa")
    return model


def serve(requests: Requests, implementation: str, setting: Setting) -> list[Row]:
    model = model_of(requests.model, setting).eval()
    model = use(model, OURS) if implementation == OURS else with_all_keys(model)
    options = {"max_new_tokens": requests.new_tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    prompts, generation, config = requests.prompts(setting.seed), GenerationConfig(**options), requests.config()

    def call() -> list[list[int]]:
        results = model.generate_batch(prompts, generation, config, persistent_manager=True)
        errors = {result.error for result in results.values() if result.error is not None}
        if errors:
            raise RuntimeError("; ".join(map(str, errors)))
        return [result.generated_tokens for result in results.values()]

    tokens = sum(map(len, call()))
    try:
        seconds = seconds_of(call, setting)
    finally:
        model.destroy_cached_continuous_batching_manager()
    return [setting.row(requests.name, SERVED, implementation, seconds=seconds, tokens_per_second=tokens / seconds)]


SUITES = {
    "generate_batch": Suite(
        "generate_batch",
        __doc__,
        dict.fromkeys(("cpu", "cuda"), WORKLOADS),
        partial(measure, serve, SERVED, implementations=IMPLEMENTATIONS),
        IMPLEMENTATIONS,
        {"cuda": DEMANDS},
        start=start,
    )
}
