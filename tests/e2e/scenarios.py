# SPDX-License-Identifier: Apache-2.0
"""What every engine is asked: requests, and the steps in which they arrive and are aborted.

Only descriptions, derived from the sizes of an engine and a tape of tokens. Engines of the same
sizes get the same requests, whatever their number of ranks, and schedule them into the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from string import ascii_uppercase
from typing import Any

# 1 to 2P+1 tokens for P up to 5.
SHORT = range(1, 12)
# Scenarios that are about a second tier of the KV cache.
OFFLOADED = ("evicted_prefixes", "aborted_loads")
# What a prefix hit leaves: 1, P-1, P, 2P-1, 2P+1 for P up to 4, and some odd numbers.
REMAINDERS = (*range(1, 10), 11, 23, 37)

JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "pet": {"enum": ["cat", "dog", "owl"]},
        "old": {"type": "boolean"},
    },
    "required": ["pet", "old"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an engine, small enough for every limit to be met.

    Attributes:
        block_size: Tokens in a block of the KV cache, on all ranks that share it together.
        num_blocks: Blocks of the KV cache; less than ``max_num_seqs`` long prompts fit.
        max_num_batched_tokens: Tokens of a step; longer prompts are chunked.
        max_model_len: Tokens of a prompt and its answer.
        max_num_seqs: Requests that run at a time.
    """

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_seqs: int = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a scenario.

    Attributes:
        prompt: Token ids.
        params: Keyword arguments of ``SamplingParams``, over those of ``GREEDY``.
        arrives: Step before which it is added.
        aborted: Step before which it is aborted, or None.
    """

    prompt: Sequence[int]
    params: dict[str, Any] = field(default_factory=dict)
    arrives: int = 0
    aborted: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the tokens do not depend on chance."""
        return "temperature" not in self.params


GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 4,
    "ignore_eos": True,
    "logprobs": 0,
    "detokenize": False,
}


def random_tokens() -> list[int]:
    """Return tokens that random checkpoints take for printable characters."""
    return Random(0).choices(range(94), k=10_000)


class Tape:
    """Deals out prompts, each from another place of a long text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.position = 0

    def take(self, num_tokens: int) -> list[int]:
        """Return the next ``num_tokens`` tokens; behind the last comes the second."""
        stop = self.position + num_tokens
        while stop > len(self.tokens):
            self.tokens = [*self.tokens, *self.tokens[1:]]
        prompt = list(self.tokens[self.position : stop])
        self.position = stop
        return prompt


Scenario = list[Request]


def scenarios(sizes: Sizes, tokens: Sequence[int]) -> dict[str, Scenario]:
    """Return every scenario by name.

    Args:
        sizes: Of the engine.
        tokens: What prompts are cut from.
    """
    tape = Tape(tokens)
    return {
        build.__name__: build(sizes, tape)
        for build in (
            short_prompts_alone,
            short_prompts_beside_decodes,
            chunked_prefill,
            mixed_batches,
            prefix_hits,
            short_prefix_hits_beside_short_prompts,
            preemption,
            aborts,
            concurrent_prefills,
            parallel_samples,
            seeds,
            unseeded,
            penalties,
            stop_strings,
            logprobs,
            prompt_logprobs,
            structured_output,
            evicted_prefixes,
            aborted_loads,
        )
    }


def short_prompts_alone(sizes: Sizes, tape: Tape) -> Scenario:
    """Each is over, after a prefill and a decode, when the next one arrives."""
    return [Request(tape.take(n), {"max_tokens": 2}, arrives=2 * i) for i, n in enumerate(SHORT)]


def short_prompts_beside_decodes(sizes: Sizes, tape: Tape) -> Scenario:
    """One arrives in every step, while two others decode."""
    num_steps = len(SHORT) + 3
    decodes = [Request(tape.take(n), {"max_tokens": num_steps}) for n in (13, 20)]
    return decodes + [
        Request(tape.take(n), {"max_tokens": 3}, arrives=i + 2) for i, n in enumerate(SHORT)
    ]


def chunked_prefill(sizes: Sizes, tape: Tape) -> Scenario:
    """Prompts of several steps, the last chunk of one being of a single token."""
    budget = sizes.max_num_batched_tokens
    lengths = (5 * budget // 2 + 3, budget + 1)
    return [Request(tape.take(n), arrives=4 * i) for i, n in enumerate(lengths)]


def mixed_batches(sizes: Sizes, tape: Tape) -> Scenario:
    """Long and short prompts arrive while others decode and are being chunked."""
    budget = sizes.max_num_batched_tokens
    lengths = (17, budget, 3, budget // 2 + 5, 1, budget + budget // 3, 9)
    return [Request(tape.take(n), {"max_tokens": 6}, arrives=i) for i, n in enumerate(lengths)]


def prefix_hits(sizes: Sizes, tape: Tape) -> Scenario:
    """The first fills four blocks; the others share them and leave ``REMAINDERS`` to compute."""
    prefix = tape.take(4 * sizes.block_size)
    first = Request(prefix + tape.take(1), {"max_tokens": 1})
    return [first] + [
        Request(prefix + tape.take(n), {"max_tokens": 3}, arrives=4) for n in REMAINDERS
    ]


def short_prefix_hits_beside_short_prompts(sizes: Sizes, tape: Tape) -> Scenario:
    """Rows with context behind shorter ones without, in steps too short to be split for P > 3."""
    prefix = tape.take(4 * sizes.block_size)
    first = Request(prefix + tape.take(1), {"max_tokens": 1})
    fresh = [Request(tape.take(n), {"max_tokens": 3}, arrives=4) for n in (2, 3, 4)]
    hits = [Request(prefix + tape.take(n), {"max_tokens": 3}, arrives=4) for n in (3, 5, 7)]
    return [first, *fresh, *hits]


def preemption(sizes: Sizes, tape: Tape) -> Scenario:
    """Four prompts that fit, and whose answers need a block more each, which do not.

    None has its answer before the last of the prompts is computed.
    """
    num_tokens = (sizes.num_blocks // 4 - 1) * sizes.block_size
    return [Request(tape.take(num_tokens - i), {"max_tokens": 18}) for i in range(4)]


def aborts(sizes: Sizes, tape: Tape) -> Scenario:
    """One is aborted between two chunks of its prompt, one while it waits, one while it decodes."""
    budget = sizes.max_num_batched_tokens
    stays = {"max_tokens": 8}
    return [
        Request(tape.take(15), stays),
        Request(tape.take(11), {"max_tokens": 20}, aborted=4),
        Request(tape.take(5 * budget // 2), arrives=1, aborted=3),
        Request(tape.take(budget), arrives=1, aborted=2),
        Request(tape.take(budget // 2), stays, arrives=2),
    ]


def concurrent_prefills(sizes: Sizes, tape: Tape) -> Scenario:
    """As many as may run, all prefilled in one step: two rows each."""
    lengths = [10 + i for i in range(sizes.max_num_seqs)]
    assert sum(lengths) <= sizes.max_num_batched_tokens
    return [Request(tape.take(n)) for n in lengths]


def parallel_samples(sizes: Sizes, tape: Tape) -> Scenario:
    """n > 1."""
    prompt = tape.take(30)
    return [
        Request(prompt, {"n": 3, "temperature": 0.9, "seed": 7, "max_tokens": 5}),
        Request(tape.take(19), {"n": 2, "temperature": 0.7, "seed": 8}),
    ]


def seeds(sizes: Sizes, tape: Tape) -> Scenario:
    """Random samples that their seeds determine."""
    warm: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 6}
    return [
        Request(tape.take(21), warm),
        Request(tape.take(33), {**warm, "seed": 2, "top_k": 20}),
        Request(tape.take(14), {**warm, "seed": 3, "top_p": 0.9}),
        Request(tape.take(25), {**warm, "seed": 4, "min_p": 0.05}),
    ]


def unseeded(sizes: Sizes, tape: Tape) -> Scenario:
    """Random samples whose seeds each rank draws for itself."""
    warm = {"temperature": 1.0, "max_tokens": 6}
    return [Request(tape.take(n), warm, arrives=n % 2) for n in (18, 29, 12)]


def penalties(sizes: Sizes, tape: Tape) -> Scenario:
    """What looks at the tokens so far, and what bends the logits."""
    length = {"max_tokens": 10}
    return [
        Request(tape.take(24), {**length, "repetition_penalty": 1.3}),
        Request(tape.take(26), {**length, "presence_penalty": 0.8, "frequency_penalty": 0.7}),
        Request(tape.take(13), {**length, "logit_bias": {11: 3.0, 12: 3.0}}),
        Request(tape.take(16), {**length, "allowed_token_ids": list(range(20, 60))}),
        Request(
            tape.take(22),
            {**length, "min_tokens": 4, "stop_token_ids": list(range(100))},
        ),
    ]


def stop_strings(sizes: Sizes, tape: Tape) -> Scenario:
    """Stops that every text soon runs into, kept and dropped."""
    stops = {"stop": ["the", *ascii_uppercase], "max_tokens": 16, "detokenize": True}
    return [
        Request(tape.take(28), stops),
        Request(tape.take(31), {**stops, "include_stop_str_in_output": True}),
    ]


def logprobs(sizes: Sizes, tape: Tape) -> Scenario:
    """Logprobs of other tokens than the sampled one."""
    return [
        Request(tape.take(40), {"logprobs": 5}),
        Request(tape.take(7), {"logprobs": 3}),
    ]


def prompt_logprobs(sizes: Sizes, tape: Tape) -> Scenario:
    """Logprobs of prompts: short, chunked, and beside one that does not ask."""
    budget = sizes.max_num_batched_tokens
    return [
        Request(tape.take(budget + budget // 4), {"prompt_logprobs": 2}),
        Request(tape.take(6), {"prompt_logprobs": 1}, arrives=1),
        Request(tape.take(20), arrives=1),
    ]


def structured_output(sizes: Sizes, tape: Tape) -> Scenario:
    """JSON of a schema, and beside it a request without one."""
    params = {
        "structured_outputs": {"json": JSON_SCHEMA},
        "max_tokens": 40,
        "ignore_eos": False,
        "detokenize": True,
    }
    return [
        Request(tape.take(32), params),
        Request(tape.take(12), {**params, "temperature": 1.0, "seed": 5}),
        Request(tape.take(23)),
    ]


def num_evicted_blocks(sizes: Sizes) -> int:
    """Return how long the prefixes are that ``evicted_prefixes`` asks for twice."""
    return 3 * sizes.num_blocks // 8


def evicted_prefixes(sizes: Sizes, tape: Tape) -> Scenario:
    """Prefixes of prompts come back when later prompts have taken all of their blocks.

    Two at a time, beside a prompt that is being chunked; one leaves a single token to compute.
    """
    requests, prefixes, start = _evicting(sizes, tape)
    return [
        *requests,
        Request(prefixes[0] + tape.take(1), arrives=start),
        Request(tape.take(sizes.max_num_batched_tokens + 9), arrives=start),
        Request(prefixes[1] + tape.take(37), arrives=start + 1),
    ]


def aborted_loads(sizes: Sizes, tape: Tape) -> Scenario:
    """Requests whose prefixes come back are aborted as they wait for them, or just after.

    Others take their place, with the same prefix and with another.
    """
    requests, prefixes, start = _evicting(sizes, tape)
    return [
        *requests,
        Request(prefixes[0] + tape.take(1), arrives=start, aborted=start + 1),
        Request(prefixes[1] + tape.take(20), arrives=start + 1, aborted=start + 3),
        Request(prefixes[0] + tape.take(3), arrives=start + 2),
        Request(prefixes[2] + tape.take(8), arrives=start + 3),
    ]


def _evicting(sizes: Sizes, tape: Tape) -> tuple[Scenario, list[list[int]], int]:
    """Return prompts one after the other, prefixes of theirs, and the step after the last one.

    Of the first three prefixes nothing is in the KV cache then.
    """
    num_tokens = num_evicted_blocks(sizes) * sizes.block_size
    prefixes = [tape.take(num_tokens) for _ in range(5)]
    # Each is over when the next one comes.
    gap = num_tokens // sizes.max_num_batched_tokens + 4
    requests = [
        Request(prefix + tape.take(1 + index), {"max_tokens": 2}, arrives=gap * index)
        for index, prefix in enumerate(prefixes)
    ]
    return requests, prefixes, gap * len(prefixes)
