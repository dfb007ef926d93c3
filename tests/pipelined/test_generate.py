"""`generate()` of a pipelined model gives the plain model's tokens, whatever the strategy and the cache."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipelined.helpers import VOCABULARY, assert_close, in_pipeline, llama, t5

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("losses_in_float64"),
    # What the pipeline says once, and `test_it_says_once_that_it_is_not_faster` asks for.
    pytest.mark.filterwarnings("ignore:torchgpipe.pipelined. calls with a cache"),
]


def talkative_t5() -> Any:
    """Return a model that does not say one token again and again, as a random one does whose embedding is its head."""
    model = t5()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(1, 0))
    return model


GENERATORS = {"llama": llama, "t5": talkative_t5}

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "beams, static cache": {"cache_implementation": "static", "num_beams": 2, "do_sample": False},
    "no cache": {"use_cache": False, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5, "num_return_sequences": 2},
}


def generate(model: Any, name: str, rows: int = 3, **options: Any) -> torch.Tensor:
    """Return tokens after prompts of different lengths, padded on the left."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCABULARY, (rows, 6), generator=draw)
    mask = (torch.arange(6) >= torch.arange(rows)[:, None]).long()
    torch.manual_seed(3)
    tokens: torch.Tensor = model.generate(
        input_ids=ids * mask, attention_mask=mask, max_new_tokens=10, pad_token_id=0, **options
    )
    return tokens


@pytest.mark.parametrize(("name", "strategy"), [*[("llama", one) for one in STRATEGIES], ("t5", "beams")])
def test_generated_tokens(name: str, strategy: str) -> None:
    model = in_pipeline(GENERATORS[name]()).eval()
    expected = generate(GENERATORS[name]().eval(), name, **STRATEGIES[strategy])
    tokens = generate(model, name, **STRATEGIES[strategy])
    assert len(expected.unique()) > 4, "the model says different things"
    assert torch.equal(tokens, expected)


def test_it_says_once_that_it_is_not_faster() -> None:
    model = in_pipeline(llama()).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            generate(model, "llama", do_sample=False)
    assert len([one for one in caught if "with a cache" in str(one.message)]) == 1


def test_a_cache_of_the_caller() -> None:
    """A cache is filled by one call and read by the next, as in a chat."""
    model = in_pipeline(llama()).eval()
    plain = llama().eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    caches = [transformers.DynamicCache(config=plain.config) for _ in range(2)]
    with torch.no_grad():
        for part in (ids[:, :3], ids[:, 3:]):
            ours = model(input_ids=part, past_key_values=caches[0], use_cache=True)
            expected = plain(input_ids=part, past_key_values=caches[1], use_cache=True)
            assert_close(ours.logits, expected.logits)
            assert ours.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
