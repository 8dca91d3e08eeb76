# SPDX-License-Identifier: Apache-2.0
"""What DualChunkSwap must do, one token at a time.

Plain Python, no numpy and nothing from the package: an expectation that shares no code and no
formula with the layout under test. Also the seeded batches that both are asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Request:
    """One request of a step: tokens scheduled, tokens in the KV cache, and whether it prefills."""

    num_scheduled: int
    num_computed: int = 0
    is_prefilling: bool = True


@dataclass(frozen=True)
class Batch:
    """One step, as all ranks see it."""

    pcp_world_size: int
    requests: tuple[Request, ...]

    def is_partitioned(self, request: Request) -> bool:
        """Whether the request is a prefill with at least one token for every chunk."""
        return request.is_prefilling and request.num_scheduled >= 2 * self.pcp_world_size

    def tokens(self) -> list[tuple[int, int]]:
        """``(request, token of the request's query)`` of each token of the global batch."""
        return [(r, t) for r, req in enumerate(self.requests) for t in range(req.num_scheduled)]


@dataclass
class Expected:
    """Rows of each rank, ``(request, first token, number of tokens)``, in no particular order."""

    replicated: set[tuple[int, int, int]] = field(default_factory=set)
    partitioned: list[set[tuple[int, int, int]]] = field(default_factory=list)


def expect(batch: Batch) -> Expected | None:
    """Deal out the tokens of a step; None if no request is partitioned."""
    size = batch.pcp_world_size
    expected = Expected(partitioned=[set() for _ in range(size)])
    num_partitioned = 0
    for r, request in enumerate(batch.requests):
        if not batch.is_partitioned(request):
            expected.replicated.add((r, 0, request.num_scheduled))
            continue
        lengths = [request.num_scheduled // (2 * size)] * 2 * size
        # Tokens that do not divide go to the tails, the middle one first, then to the heads.
        outwards = [*range(size, 2 * size), *reversed(range(size))]
        for chunk in outwards[: request.num_scheduled % (2 * size)]:
            lengths[chunk] += 1
        for chunk, length in enumerate(lengths):
            pair = min(chunk, 2 * size - 1 - chunk)
            rank = (pair + num_partitioned) % size
            expected.partitioned[rank].add((r, sum(lengths[:chunk]), length))
        num_partitioned += 1
    return expected if num_partitioned else None


def causal_area(batch: Batch, tokens: list[tuple[int, int]]) -> int:
    """Keys that some tokens attend to, themselves included."""
    return sum(batch.requests[r].num_computed + token + 1 for r, token in tokens)


def edge_lengths(pcp_world_size: int) -> list[int]:
    """Query lengths at which the layout changes its mind, or might."""
    size = pcp_world_size
    return [1, size - 1, size, 2 * size - 1, 2 * size, 2 * size + 1, 4 * size - 1, 4 * size + 1]


def random_batches(
    pcp_world_size: int, num_batches: int, *, max_num_reqs: int = 8, seed: int = 0
) -> Iterator[Batch]:
    """Yield batches in growing size, so that the first to fail is a small one.

    Decodes (some of several tokens, as in speculative decoding) and prefills (fresh, or behind a
    prefix that is cached or was scheduled before) stand in any order. Nine batches in ten have a
    prefill that must be partitioned.
    """
    rng = Random(f"{pcp_world_size}-{seed}")
    for i in range(num_batches):
        num_reqs = rng.randint(1, 1 + i * max_num_reqs // num_batches)
        requests = [_random_request(rng, pcp_world_size) for _ in range(num_reqs)]
        if rng.random() < 0.9:
            num_scheduled = 2 * pcp_world_size + rng.choice(
                [0, 1, rng.randrange(5 * pcp_world_size)]
            )
            requests[rng.randrange(num_reqs)] = Request(num_scheduled, _random_prefix(rng))
        yield Batch(pcp_world_size, tuple(requests))


def _random_request(rng: Random, pcp_world_size: int) -> Request:
    kind = rng.random()
    if kind < 0.3:
        return Request(1, rng.randint(1, 500), is_prefilling=False)
    if kind < 0.4:
        return Request(rng.randint(2, 3 * pcp_world_size), rng.randint(1, 500), is_prefilling=False)
    if kind < 0.7:
        return Request(rng.choice(edge_lengths(pcp_world_size)), _random_prefix(rng))
    return Request(rng.randint(1, 6 * pcp_world_size), _random_prefix(rng))


def _random_prefix(rng: Random) -> int:
    return rng.choice([0, 0, 0, 1, 16, rng.randint(2, 5000)])
