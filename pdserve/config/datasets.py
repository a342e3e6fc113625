"""Settings of a benchmark's data sets: one frozen struct per data set, and their flags.

Names are vLLM's (`vllm bench serve`) wherever it has one. Knows no tokens and reads no file.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from pdserve.config.checks import (
    require,
    require_finite,
    require_not_negative,
    require_positive,
)
from pdserve.config.setting import declare
from pdserve.errors import ConfigError

_MAX_REQUESTS: Final = 1_000_000
"""Of a plan, each of whose requests is made before the first is sent."""


class DatasetName(enum.Enum):
    """The available data sets."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    CUSTOM = "custom"
    PREFIX_REPETITION = "prefix_repetition"
    TRACE = "trace"
    MULTI_TURN = "multi-turn"
    PD_INTERFERENCE = "pd-interference"

    @property
    def reads_a_file(self) -> bool:
        """Whether it needs `--dataset-path`."""
        return self in (DatasetName.SHAREGPT, DatasetName.CUSTOM, DatasetName.TRACE)

    @property
    def has_own_times(self) -> bool:
        """Whether it sets the times of its requests itself, so that no arrivals are drawn."""
        return self in (DatasetName.TRACE, DatasetName.PD_INTERFERENCE)

    @property
    def has_exact_lengths(self) -> bool:
        """Whether vLLM's client requests full-length answers for such data sets."""
        return self in (DatasetName.RANDOM, DatasetName.TRACE)

    @property
    def field(self) -> str:
        """The field of `DatasetConfig` with the settings that it alone has."""
        return self.value.removeprefix("pd-").replace("-", "_")


class RandomConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of random tokens, of exact lengths.

    Attributes:
        input_len: Tokens of a prompt after the common prefix.
        range_ratio: Lengths of prompts and outputs are drawn from [n (1 - r), n (1 + r)].
        prefix_len: Tokens that all prompts begin with.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        require_positive("random-input-len", self.input_len)
        require_positive("random-output-len", self.output_len)
        require_not_negative("random-prefix-len", self.prefix_len)
        require(
            0 <= self.range_ratio < 1,
            "random-range-ratio",
            self.range_ratio,
            "it must be at least 0 and below 1",
        )


class ShareGptConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations in ShareGPT's format; the first turn is the prompt.

    Attributes:
        output_len: Output tokens to request; None requests as many as the second turn has.
    """

    output_len: int | None = None

    def __post_init__(self) -> None:
        require_positive("sharegpt-output-len", self.output_len)


class CustomConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The user's own JSONL file.

    Attributes:
        output_len: Output tokens to request, whatever the file says; None uses the file's
            number, or 256 if it has none.
    """

    output_len: int | None = None

    def __post_init__(self) -> None:
        require_positive("custom-output-len", self.output_len)


class PrefixRepetitionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that share a few prefixes."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def __post_init__(self) -> None:
        for name, number in (
            ("prefix-len", self.prefix_len),
            ("suffix-len", self.suffix_len),
            ("num-prefixes", self.num_prefixes),
            ("output-len", self.output_len),
        ):
            require_positive(f"prefix-repetition-{name}", number)


class TraceDataConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A timed trace in Mooncake's or Azure's format.

    Attributes:
        speedup: Divisor of its times.
        start_s, duration_s: The part that is played, in seconds of the trace's own time from
            its first timestamp; None plays it to its end.
        length_scale: Lengths of prompts and outputs, and the tokens per hash id, are
            multiplied by this, so that what is shared stays shared.
        block_size: Tokens per hash id in the file.
    """

    speedup: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    length_scale: float = 1.0
    block_size: int = 512

    def __post_init__(self) -> None:
        require_positive("trace-speedup", self.speedup)
        require_not_negative("trace-start", self.start_s)
        require_positive("trace-duration", self.duration_s)
        require_positive("trace-length-scale", self.length_scale)
        require_positive("trace-block-size", self.block_size)
        for name, number in (
            ("speedup", self.speedup),
            ("start", self.start_s),
            ("length-scale", self.length_scale),
        ):
            require_finite(f"trace-{name}", number)


class MultiTurnConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations: each turn's prompt follows everything said before.

    Attributes:
        num_turns: Turns of each conversation; `num_prompts` counts turns, not conversations.
        input_len: Tokens of the first prompt.
        turn_input_len: Tokens that each later turn adds.
        think_time_s: Mean of the pause before a later turn, drawn from an exponential
            distribution; 0 sends it at once.
    """

    num_turns: int = 4
    input_len: int = 512
    turn_input_len: int = 64
    output_len: int = 64
    think_time_s: float = 1.0

    def __post_init__(self) -> None:
        for name, number in (
            ("num-turns", self.num_turns),
            ("input-len", self.input_len),
            ("turn-input-len", self.turn_input_len),
            ("output-len", self.output_len),
        ):
            require_positive(f"multi-turn-{name}", number)
        require_not_negative("multi-turn-think-time", self.think_time_s)
        require_finite("multi-turn-think-time", self.think_time_s)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `pd-interference` that depends on the model's speed.

    Attributes:
        steady_output_len: Tokens of a steady answer.
        steady_period_s: Time between two requests of a steady user.
        burst_period_s: Between two bursts.
    """

    steady_output_len: int
    steady_period_s: float
    burst_period_s: float


class InterferenceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Steady short decoders, and bursts of long prompts between them.

    Values that are None are measured before the run, so that the load suits model and machine.

    Attributes:
        steady_streams: Users that request short answers at a steady pace.
        steady_period_s: Time between two requests of one of them, whether or not it has its answer.
        burst_size: Long prompts that arrive at the same time.
        burst_period_s: Time between two bursts; the first comes after one period.
        duration_s: Time for which requests are sent.
    """

    steady_streams: int = 4
    steady_input_len: int = 32
    steady_output_len: int | None = None
    steady_period_s: float | None = None
    burst_size: int = 1
    burst_input_len: int = 1024
    burst_output_len: int = 8
    burst_period_s: float | None = None
    duration_s: float = 20.0

    @property
    def pace(self) -> Pace | None:
        """The values that depend on the model's speed; None if some must be measured."""
        if (
            self.steady_output_len is None
            or self.steady_period_s is None
            or self.burst_period_s is None
        ):
            return None
        return Pace(
            steady_output_len=self.steady_output_len,
            steady_period_s=self.steady_period_s,
            burst_period_s=self.burst_period_s,
        )

    def __post_init__(self) -> None:
        for name, number in (
            ("steady-streams", self.steady_streams),
            ("steady-input-len", self.steady_input_len),
            ("steady-output-len", self.steady_output_len),
            ("steady-period", self.steady_period_s),
            ("burst-input-len", self.burst_input_len),
            ("burst-output-len", self.burst_output_len),
            ("burst-period", self.burst_period_s),
            ("duration", self.duration_s),
        ):
            require_positive(f"interference-{name}", number)
            require_finite(f"interference-{name}", number)
        require_not_negative("interference-burst-size", self.burst_size)
        for name, num_each, period_s in (
            ("steady-period", self.steady_streams, self.steady_period_s),
            ("burst-period", self.burst_size, self.burst_period_s),
        ):
            if period_s is not None:
                num = num_each * self.duration_s / period_s
                remedy = f"use a longer one, as it makes more than {_MAX_REQUESTS:,} requests"
                require(num <= _MAX_REQUESTS, f"interference-{name}", period_s, remedy)


class DatasetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests to send. The same config makes the same plan, token by token.

    Attributes:
        name: Which data set.
        num_prompts: Number of requests; `pd-interference` runs for a time instead, and a trace sends
            at most this many of its own.
        seed: Seed of everything random.
        path: The file, for data sets that read one.
        disable_shuffle: Use a file's entries in its own order.
        no_oversample: Send fewer requests instead of repeating entries, if a file has too few.
    """

    name: DatasetName = DatasetName.RANDOM
    num_prompts: int = 1000
    seed: int = 0
    path: str = ""
    disable_shuffle: bool = False
    no_oversample: bool = False
    random: RandomConfig = RandomConfig()
    sharegpt: ShareGptConfig = ShareGptConfig()
    custom: CustomConfig = CustomConfig()
    prefix_repetition: PrefixRepetitionConfig = PrefixRepetitionConfig()
    trace: TraceDataConfig = TraceDataConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    interference: InterferenceConfig = InterferenceConfig()

    def __post_init__(self) -> None:
        is_number = 0 < self.num_prompts <= _MAX_REQUESTS
        require(is_number, "num-prompts", self.num_prompts, f"use 1 to {_MAX_REQUESTS}")
        require_not_negative("seed", self.seed)
        if self.name.reads_a_file and not self.path:
            raise ConfigError(
                f"--dataset-name {self.name.value} reads a file: name it with --dataset-path FILE",
                param="dataset-path",
            )
        require(
            not self.path or self.name.reads_a_file,
            "dataset-path",
            self.path,
            f"--dataset-name {self.name.value} reads no file: use sharegpt, custom or trace, or "
            "leave the path out",
        )


# fmt: off
DATASET_SETTINGS: Final = (
    *declare(
        "dataset",
        DatasetConfig,
        "data set",
        (
            ("dataset-name", "name", "NAME", "random, sharegpt, custom, prefix_repetition, trace, multi-turn or pd-interference"),
            ("dataset-path", "path", "FILE", "file for sharegpt (JSON), custom (JSONL) or trace (Mooncake's JSONL, or Azure's CSV)"),
            ("num-prompts", "num_prompts", "N", "number of requests; pd-interference runs for a time instead"),
            ("seed", "seed", "N", "seed for prompts, lengths and arrivals; the same seed sends the same requests"),
            ("disable-shuffle", "disable_shuffle", "", "use a file's entries in its own order"),
            ("no-oversample", "no_oversample", "", "send fewer requests instead of repeating entries if a file has too few"),
        ),
    ),
    *declare(
        "dataset",
        DatasetConfig,
        "data set: random",
        (
            ("random-input-len", "random.input_len", "N", "tokens of each prompt after the common prefix"),
            ("random-output-len", "random.output_len", "N", "output tokens of each request"),
            ("random-range-ratio", "random.range_ratio", "R", "lengths are drawn from n(1-R) to n(1+R)"),
            ("random-prefix-len", "random.prefix_len", "N", "tokens of the prefix that all prompts share"),
        ),
    ),
    *declare(
        "dataset",
        DatasetConfig,
        "data set: files",
        (
            ("sharegpt-output-len", "sharegpt.output_len", "N", "output tokens of each request; auto is the length of the file's answer"),
            ("custom-output-len", "custom.output_len", "N", "output tokens of each request; auto is the number in the file, or 256"),
        ),
    ),
    *declare(
        "dataset",
        DatasetConfig,
        "data set: prefix_repetition",
        (
            ("prefix-repetition-prefix-len", "prefix_repetition.prefix_len", "N", "tokens of each shared prefix"),
            ("prefix-repetition-suffix-len", "prefix_repetition.suffix_len", "N", "tokens of each prompt after the shared prefix"),
            ("prefix-repetition-num-prefixes", "prefix_repetition.num_prefixes", "N", "different prefixes"),
            ("prefix-repetition-output-len", "prefix_repetition.output_len", "N", "output tokens of each request"),
        ),
    ),
    *declare(
        "dataset",
        DatasetConfig,
        "data set: trace",
        (
            ("trace-speedup", "trace.speedup", "X", "factor by which the trace is played faster"),
            ("trace-start", "trace.start_s", "SECONDS", "start of the part to play, in the trace's own time"),
            ("trace-duration", "trace.duration_s", "SECONDS", "length of the part to play, in the trace's own time; auto plays it to the end"),
            ("trace-length-scale", "trace.length_scale", "X", "factor for the lengths of prompts and outputs; what they share stays shared"),
            ("trace-block-size", "trace.block_size", "N", "tokens per hash id in the file"),
        ),
    ),
    *declare(
        "dataset",
        DatasetConfig,
        "data set: multi-turn",
        (
            ("multi-turn-num-turns", "multi_turn.num_turns", "N", "turns of each conversation; --num-prompts counts turns"),
            ("multi-turn-input-len", "multi_turn.input_len", "N", "tokens of the first prompt"),
            ("multi-turn-turn-input-len", "multi_turn.turn_input_len", "N", "tokens that each later turn adds"),
            ("multi-turn-output-len", "multi_turn.output_len", "N", "output tokens of each request"),
            ("multi-turn-think-time", "multi_turn.think_time_s", "SECONDS", "mean pause before a later turn"),
        ),
    ),
    *declare(
        "dataset",
        DatasetConfig,
        "data set: pd-interference",
        (
            ("interference-steady-streams", "interference.steady_streams", "N", "users that request short answers at a steady pace"),
            ("interference-steady-input-len", "interference.steady_input_len", "N", "prompt tokens of a steady user"),
            ("interference-steady-output-len", "interference.steady_output_len", "N", "output tokens of a steady user; auto is about a second's worth, measured before the run"),
            ("interference-steady-period", "interference.steady_period_s", "SECONDS", "time between two requests of a steady user; auto is 1.25 times the measured time of an answer"),
            ("interference-burst-size", "interference.burst_size", "N", "long prompts that arrive at once; 0 sends none, for comparison"),
            ("interference-burst-input-len", "interference.burst_input_len", "N", "tokens of a long prompt"),
            ("interference-burst-output-len", "interference.burst_output_len", "N", "output tokens of a long prompt"),
            ("interference-burst-period", "interference.burst_period_s", "SECONDS", "time between two bursts; auto keeps one prefill engine busy half the time, as measured"),
            ("interference-duration", "interference.duration_s", "SECONDS", "time for which requests are sent"),
        ),
    ),
)
# fmt: on
"""All settings of a `DatasetConfig` whose root is called `dataset`."""
