"""When requests are due: drawn before the run, never shifted while it runs.

The same rules as `vllm bench serve`: gaps are gamma distributed with shape `burstiness` (1 is
Poisson, infinity is constant), and are scaled so that the last request is due after `num / rate`
seconds; a ramp changes the rate from request to request instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from pdserve.bench.records import Planned
from pdserve.config.bench import RampUp
from pdserve.errors import ConfigError

_LONGEST_S: Final = 1e7
"""Of a run, about four months: nobody waits for the last request of a longer one."""


class ArrivalLaw(msgspec.Struct, frozen=True, kw_only=True):
    """An arrival process.

    Attributes:
        rate: Requests per second; infinity makes all of them due at once (with
            `Options.max_concurrency` a closed loop).
        burstiness: Shape of the gamma distribution of gaps; below 1 burstier than Poisson,
            infinity constant.
        ramp: Replaces `rate` if set, from `ramp_start_rps` to `ramp_end_rps`.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: RampUp | None = None
    ramp_start_rps: float | None = None
    ramp_end_rps: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(
                f"--request-rate is {self.rate:g}: use a number above 0, or inf",
                param="request-rate",
            )
        if not self.burstiness > 0:
            raise ConfigError(
                f"--burstiness is {self.burstiness:g}: use a number above 0, or inf",
                param="burstiness",
            )
        if self.ramp is None:
            for flag, given in (
                ("ramp-up-start-rps", self.ramp_start_rps),
                ("ramp-up-end-rps", self.ramp_end_rps),
            ):
                if given is not None:
                    raise ConfigError(
                        f"--{flag} is {given:g}, which needs --ramp-up-strategy: add it, or leave "
                        f"--{flag} out",
                        param=flag,
                    )
            return
        if not math.isinf(self.rate):
            raise ConfigError(
                f"--request-rate is {self.rate:g}, but with --ramp-up-strategy the rate goes from "
                "--ramp-up-start-rps to --ramp-up-end-rps: leave --request-rate out",
                param="request-rate",
            )
        for flag, given in (
            ("ramp-up-start-rps", self.ramp_start_rps),
            ("ramp-up-end-rps", self.ramp_end_rps),
        ):
            if given is None or not 0 < given < math.inf:
                raise ConfigError(
                    f"--{flag} is {given}: --ramp-up-strategy needs a number above 0", param=flag
                )

    def __str__(self) -> str:
        if self.ramp is not None:
            return (
                f"{self.ramp.value} ramp rate={self.ramp_start_rps:g}..{self.ramp_end_rps:g} "
                f"burstiness={self.burstiness:g}"
            )
        if math.isinf(self.rate):
            return "burst"
        if math.isinf(self.burstiness):
            return f"constant rate={self.rate:g}"
        if self.burstiness == 1.0:
            return f"poisson rate={self.rate:g}"
        return f"gamma rate={self.rate:g} burstiness={self.burstiness:g}"


def schedule(plan: Sequence[Planned], arrivals: ArrivalLaw, seed: int) -> list[Planned]:
    """Return the plan with a due time for every request that has none.

    Requests of a timed data set keep theirs; a request that follows another (`after`) is due after
    the other's end. Equal arguments draw equal times.
    """
    open_ones = [each for each in plan if each.at_s is None and each.after is None]
    times = iter(due_times(len(open_ones), arrivals, seed))
    return [
        msgspec.structs.replace(each, at_s=next(times))
        if each.at_s is None and each.after is None
        else each
        for each in plan
    ]


def due_times(num: int, arrivals: ArrivalLaw, seed: int) -> list[float]:
    """Return `num` due times in seconds, in order.

    Raises:
        ConfigError: The law is so extreme that all gaps are 0, or endless.
    """
    rates = _rates(num, arrivals)
    if num == 0 or math.isinf(rates[0]):
        return [0.0] * num
    with np.errstate(over="ignore"):
        mean_gaps = 1.0 / rates
    if math.isinf(arrivals.burstiness):
        gaps = mean_gaps
    else:
        shape = arrivals.burstiness
        gaps = np.random.default_rng(seed).gamma(shape, mean_gaps / shape)
    times = np.cumsum(gaps)
    if arrivals.ramp is None and 0 < times[-1] < math.inf:
        times *= num / arrivals.rate / times[-1]
    if _LONGEST_S < times[-1] < math.inf:
        raise ConfigError(
            f"--request-rate {rates[0]:g} has the last of {num} requests due after {times[-1]:.3g} "
            f"s, at most {_LONGEST_S:.0e} s are run: use a higher rate",
            param="request-rate",
        )
    if not 0 < times[-1] < math.inf:
        raise ConfigError(
            f"--request-rate {rates[0]:g} and --burstiness {arrivals.burstiness:g} make all gaps "
            "0, or endless: use values nearer to 1",
            param="burstiness",
        )
    return [float(time) for time in times]


def _rates(num: int, arrivals: ArrivalLaw) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the rate at each request."""
    start, end = arrivals.ramp_start_rps, arrivals.ramp_end_rps
    if arrivals.ramp is None or start is None or end is None:
        return np.full(num, arrivals.rate)
    progress = np.arange(num) / max(num - 1, 1)
    match arrivals.ramp:
        case RampUp.LINEAR:
            return start + (end - start) * progress
        case RampUp.EXPONENTIAL:
            return start * (end / start) ** progress


def cancel_some(plan: Sequence[Planned], share: float, seed: int) -> list[Planned]:
    """Return the plan with random cancellations for a share of its requests.

    A client cancels after a random number of tokens, from none to all but one. Requests that
    another one follows are not cancelled, so that conversations continue. Equal arguments give
    equal results.

    Args:
        plan: The planned requests.
        share: Share of all requests, 0 to 1.
        seed: Seed of the random choices.

    Raises:
        ConfigError: `share` is not in that range.
    """
    if not 0 <= share <= 1:
        raise ConfigError(
            f"--cancel-share is {share:g}: use a number from 0 to 1", param="cancel-share"
        )
    if share == 0:
        return list(plan)
    rng = np.random.default_rng([seed, 1])
    followed = {each.after for each in plan}
    eligible = [place for place, each in enumerate(plan) if each.index not in followed]
    num = min(len(eligible), round(share * len(plan)))
    chosen = set(rng.choice(eligible, size=num, replace=False).tolist()) if num else set()
    points = rng.random(len(plan))
    return [
        msgspec.structs.replace(each, cancel_after_tokens=int(points[place] * each.max_tokens))
        if place in chosen
        else each
        for place, each in enumerate(plan)
    ]
