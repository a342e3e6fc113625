"""What lm-evaluation-harness reads out of an echo: the tokens that it means to score, or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.server.conftest import make_engine, serving
from tests.text.tiny import make_tokenizer

PATH = "/v1/completions"
CONTEXT, CONTINUATION = "The lazy dog", " sleeps"


@pytest.fixture
def tokenizer():
    return make_tokenizer("byte_fallback")  # adds <s>, as Llama's does


async def echoed(text, tokenizer, prompt):
    """The log-probabilities that the request of its `local-completions` gets."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    vocab_size = tokenizer.vocab_size
    own = replace(text, tokenizer=tokenizer, vocab_size=vocab_size)
    async with serving(own, make_engine(text, vocab_size=vocab_size)) as server:
        [choice] = (await server.ok(PATH, body | {"seed": 1234}))["choices"]
    return choice["logprobs"]


def scored(columns, num_context):
    """Its rule: what follows the context as it counts that, but for the token it had generated."""
    span = slice(num_context, -1)
    assert None not in columns["token_logprobs"][span]
    assert len(columns["top_logprobs"][span]) == len(columns["token_logprobs"][span])
    return columns["tokens"][span]


@pytest.mark.parametrize("add_bos_token", [True, False])
async def test_of_a_prompt_of_tokens_the_continuation_is_scored(text, tokenizer, add_bos_token):
    def encode(some_text):
        return tokenizer.encode(some_text, add_special_tokens=add_bos_token)

    context, whole = encode(CONTEXT), encode(CONTEXT + CONTINUATION)
    columns = await echoed(text, tokenizer, whole)
    expected = [tokenizer.token_text(token_id) for token_id in whole[len(context) :]]
    assert scored(columns, len(context)) == expected


async def test_a_prompt_of_text_is_echoed_with_the_token_that_is_added_as_by_vllm(text, tokenizer):
    prompt = CONTEXT + CONTINUATION
    columns = await echoed(text, tokenizer, prompt)
    token_ids = tokenizer.encode(prompt)
    assert columns["tokens"][0] == "<s>"
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    assert None not in columns["token_logprobs"][1:]
    assert columns["tokens"][:-1] == [tokenizer.token_text(token_id) for token_id in token_ids]
    # lm-eval counts the context without it: `docs/lm-eval.md` says to send tokens.
    num_context = len(tokenizer.encode(CONTEXT, add_special_tokens=False))
    assert len(scored(columns, num_context)) == 1 + len(token_ids) - 1 - num_context
