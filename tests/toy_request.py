"""A request as the toy's ranks know it: its tokens, and whether its grammar keeps it waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.step import NewRequest


class ToyRequest:
    """What the ranks know of a request.

    Attributes:
        wrong: Which KV was not what its tokens make it.
        is_lost: It was to be loaded, and has not come.
        is_rejected: It came with tokens that its grammar does not allow.
        sat_out_at: With how many tokens its grammar last kept it from another one.
    """

    def __init__(self, request: NewRequest) -> None:
        self.request_id = request.request_id
        self.wrong: str | None = None
        self.is_lost = False
        self.num_prompt = len(request.prompt_token_ids)
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.blocks: list[int] = list(request.block_ids)
        self.sampling: SamplingParams = request.sampling
        self.values: list[int] = []
        self.is_rejected = self.sampling.grammar is not None and any(
            token_id % 2 for token_id in request.output_token_ids
        )
        self.sat_out_at: int | None = None

    def sits_out(self) -> bool:
        """Whether it has no token this time, because its grammar is late."""
        if self.sampling.grammar is None or self.sat_out_at == len(self.tokens):
            return False
        is_late = self.values[len(self.tokens) - 1] % 3 == 0
        if is_late:
            self.sat_out_at = len(self.tokens)
        return is_late

    @property
    def prompt_token_ids(self) -> list[int]:
        """Its prompt."""
        return self.tokens[: self.num_prompt]

    @property
    def output_token_ids(self) -> list[int]:
        """What was sampled so far."""
        return self.tokens[self.num_prompt :]
