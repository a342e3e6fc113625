"""Reads weights and brings them to the layers that own them.

A `WeightSource` names its tensors before any of them is read, so that a model and a checkpoint that
do not match are refused at once, with all names. Tensors then stream, one at a time, into the
layers' `Slot`s; a rank reads only its slots' regions, and no tensors of other ranks. Memory never
holds more than this rank's weights and the current region. Knows no architecture.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import closing, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.fp8 import Fp8Weight, NotANumberError
from pdserve.models.config_json import Fields, read_config
from pdserve.models.file_digest import DigestCache, FileDigest
from pdserve.models.quantised import read_quantised
from pdserve.models.quantised_format import NUMBERS
from pdserve.models.scaled import ScaledMatrix
from pdserve.models.shard_paths import shard_paths
from pdserve.models.slots import Slot
from pdserve.models.weight_file import StoredTensor, WeightFile, of_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from pdserve.models.quantised_format import QuantisedFormat, Region, Scheme
    from pdserve.parallel.group import World

_DECODER = "model."
"""How tensors of a decoder with a head are named."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_DIGEST_THREADS = 4
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SAME_DTYPE = {dtype: name for name, dtype in _DTYPES.items()}


class WeightSource(Protocol):
    """Named tensors, and a digest of all of them together."""

    def digesting(self, world: World) -> AbstractContextManager[Callable[[], str]]:
        """Compute a digest while the caller loads; the returned function waits for it.

        Equal digests mean equal weights, and every rank of an engine has the same one. All its
        ranks enter and call at the same time.

        Raises:
            ConfigError: Also from the call: a file cannot be read, changes meanwhile, or differs
                between ranks.
        """
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights."""
        ...

    def check(
        self, slots: Mapping[str, Slot], *, tied_head: bool, unused: tuple[str, ...] = ()
    ) -> None:
        """Refuse tensors that are missing or unexpected, with all their names.

        Args:
            slots: The model's slots.
            tied_head: Whether a stored `lm_head.weight` repeats the embedding and is not read.
            unused: Prefixes of names that may be stored and are not read.

        Raises:
            ConfigError: Names or shapes differ.
        """
        ...

    def tensors(self, slots: Mapping[str, Slot]) -> Iterator[tuple[str, Tensor | Fp8Weight]]:
        """Yield the region of every slot that has a `load` once, on the CPU, cheapest first.

        A tensor is valid until the next one. Only a slot with a `keep` may get an `Fp8Weight`.
        """
        ...


def load_weights(
    slots: Mapping[str, Slot],
    source: WeightSource,
    *,
    tied_head: bool,
    unused: tuple[str, ...] = (),
    progress: Callable[[str], None],
) -> None:
    """Stream `source` into those of `slots` that are this rank's.

    Raises:
        ConfigError: They do not fit, or a file cannot be read.
    """
    source.check(slots, tied_head=tied_head, unused=unused)
    total = max(1, sum(slot.num_elements for slot in slots.values()))
    done, reported = 0, 0
    for name, tensor in source.tensors(slots):
        slot = slots[name]
        if isinstance(tensor, Fp8Weight):
            assert slot.keep is not None
            try:
                slot.keep.load(tensor)
            except NotANumberError:
                raise ConfigError(f"{name} has NaN among its numbers", param="model") from None
        else:
            assert slot.load is not None
            slot.load(tensor)
        done += slot.num_elements
        percent = 100 * done // total
        if percent >= reported + 10:
            reported = percent - percent % 10
            progress(f"weights {reported} %")


class Checkpoint:
    """The safetensors files of a model directory, with an index or without.

    Opening reads the files' headers only. Embedding models are saved without a head, and with
    tensor names relative to their decoder. Of models that also read images only the decoder is
    read. Quantised weights are widened.

    Raises:
        ConfigError: `shard_paths` refuses the directory, a file is a Git LFS pointer or is cut
            short; or it is quantised in another format (`quantised`).
    """

    def __init__(self, directory: Path) -> None:
        has_config = (directory / "config.json").is_file()
        config = read_config(directory) if has_config else {}
        self._format = read_quantised(Fields("", config))
        self._shards = [WeightFile(path) for path in shard_paths(directory)]
        if not any(shard.tensors for shard in self._shards):
            raise ConfigError(
                f"the safetensors files in {str(directory)!r} hold no tensors", param="model"
            )
        if "text_config" in config:
            for shard in self._shards:
                shard.tensors = of_decoder(shard.tensors)
        if not any(name.startswith(_DECODER) for shard in self._shards for name in shard.tensors):
            for shard in self._shards:
                shard.tensors = {_DECODER + name: each for name, each in shard.tensors.items()}

    @contextmanager
    def digesting(self, world: World) -> Iterator[Callable[[], str]]:
        """See `WeightSource`: covers all bytes and names of files, and how they are widened."""
        files = FileDigest(
            [shard.path for shard in self._shards],
            cache=DigestCache.of_user(),
            world=world,
            num_threads=min(_MAX_DIGEST_THREADS, torch.get_num_threads()),
        )
        with closing(files):
            form = self._format
            yield files.result if form is None else lambda: _digest_with(form, files.result())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements that are neither quantised nor scales."""
        counts: dict[str, int] = {}
        for stored in self._plain.values():
            counts[stored.dtype] = counts.get(stored.dtype, 0) + math.prod(stored.shape)
        name = max(counts, key=lambda name: counts[name], default="BF16")
        if name not in _DTYPES:
            raise ConfigError(
                f"weights are stored as {name}, which is not supported: use one of "
                f"{', '.join(_DTYPES)}",
                param="model",
            )
        return _DTYPES[name]

    def __contains__(self, name: str) -> bool:
        return name in self._plain or name in self._quantised

    def integers(self, name: str) -> Tensor | None:
        """Return a tensor that is not a weight, as int64; None if it does not exist."""
        found = [each.to(torch.int64, copy=True) for each in self._whole(name)]
        return found[0] if found else None

    def _whole(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor that is stored as it is, if there is one."""
        for _, each in self.tensors({name: Slot((), lambda _: None)}):
            assert not isinstance(each, Fp8Weight)
            yield each

    def check_tied_head(self) -> None:
        """Refuse a stored head that differs from the embedding, though config.json ties them.

        Both are compared as they are mapped; neither is copied.

        Raises:
            ConfigError: They differ, so transformers would not tie them.
        """
        if _HEAD not in self:
            return
        if {_HEAD, _EMBEDDING} & self._quantised.keys():
            raise _untied()
        for embedding, head in zip(self._whole(_EMBEDDING), self._whole(_HEAD), strict=False):
            if embedding.dtype != head.dtype or not torch.equal(embedding, head):
                raise _untied()

    def check(
        self, slots: Mapping[str, Slot], *, tied_head: bool, unused: tuple[str, ...] = ()
    ) -> None:
        """See `WeightSource`."""
        names: set[str] = set()
        for shard in self._shards:
            for name in shard.tensors:
                if name in names:
                    raise ConfigError(
                        f"tensor {name} is in two shards: it may be in only one", param="model"
                    )
                names.add(name)
        stored, plain, quantised = self._stored, self._plain, self._quantised
        missing = [name for name in slots if name not in self]
        unexpected = [
            name
            for name in [*plain, *quantised]
            if (name not in slots or (name in plain and name in quantised))
            and not name.endswith("rotary_emb.inv_freq")
            and not (tied_head and name == _HEAD)
            and not name.startswith(unused)
            and not self._is_bias_of_zeros(name)
        ]
        different = [
            f"{name} is {list(stored[name].shape)}, config.json says {list(slot.shape)}"
            for name, slot in slots.items()
            if name in plain and stored[name].shape != slot.shape
        ]
        foreign = [
            f"{name} is {stored[name].dtype}"
            for name in slots
            if name in plain and stored[name].dtype not in _DTYPES
        ]
        unfit = [
            f"{name} {list(slot.shape)} of "
            + ", ".join(f"{each} {stored[each].dtype} {list(stored[each].shape)}" for each in parts)
            for name, slot in slots.items()
            if (parts := sorted(quantised.get(name, {}).values()))
            and self._scheme(name, slots) is None
        ]
        problems = [
            f"{text}: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else "")
            for text, names in (
                ("missing", missing),
                ("unexpected", sorted(unexpected)),
                ("of another shape", different),
                ("of an unsupported dtype", foreign),
                ("not as quantization_config says", unfit),
            )
            if names
        ]
        if problems:
            raise ConfigError(
                f"the weights do not match config.json: {'; '.join(problems)}", param="model"
            )

    def tensors(self, slots: Mapping[str, Slot]) -> Iterator[tuple[str, Tensor | Fp8Weight]]:
        """See `WeightSource`. Shard by shard, in the order of the data."""
        dtype, quantised, kept = self.dtype, self._quantised, self._kept(slots)
        wanted = {name: slot for name, slot in slots.items() if slot.load is not None}
        regions = {name: slot.region for name, slot in wanted.items() if name in self._plain}
        weights: dict[str, tuple[str, Scheme]] = {}
        for name in wanted.keys() & quantised.keys():
            slot, scheme = wanted[name], self._scheme(name, slots)
            assert scheme is not None, "see `check`"
            weights[quantised[name][NUMBERS]] = name, scheme
            for role, part in scheme.regions(slot.shape, slot.region).items():
                regions[quantised[name][role]] = part
        apart = self._read_apart([name for name, _ in weights.values()], regions)
        for shard in self._shards:
            here = [
                name
                for name in shard.tensors
                if name in weights or (name in regions and name in self._plain)
            ]
            if not here:
                continue
            with shard.opened() as read:
                for name in here:
                    if name not in weights:
                        yield name, read(name, regions[name])
                        continue
                    weight, scheme = weights[name]
                    tensors = {
                        role: apart.pop(part) if part in apart else read(part, regions[part])
                        for role, part in quantised[weight].items()
                    }
                    slot = slots[weight]
                    if isinstance(scheme, ScaledMatrix) and weight in kept:
                        yield weight, scheme.kept(tensors, shape=slot.shape, region=slot.region)
                        continue
                    try:
                        found = scheme.widened(
                            tensors, shape=slot.shape, region=slot.region, to=dtype
                        )
                    except ValueError as error:
                        raise ConfigError(f"{weight}: {error}", param="model") from None
                    yield weight, found

    def _kept(self, slots: Mapping[str, Slot]) -> set[str]:
        """Names of the weights that stay in FP8: those of layers that can keep all of theirs."""
        runs: dict[Hashable, list[int | None]] = {}
        for name, slot in slots.items():
            if (keep := slot.keep) is not None:
                scheme = self._scheme(name, slots) if name in self._quantised else None
                run = None
                if isinstance(scheme, ScaledMatrix) and keep.dtype == self.dtype:
                    run = scheme.run(slot.region)
                runs.setdefault(keep.layer, []).append(run)
        return {
            name
            for name, slot in slots.items()
            if (keep := slot.keep) is not None
            and (found := runs[keep.layer])[0] is not None
            and found == keep.num_slots * found[:1]
        }

    def _read_apart(
        self, names: Collection[str], regions: Mapping[str, Region | None]
    ) -> dict[str, Tensor]:
        """Read the tensors of quantised weights that are in other files than their numbers."""
        found: dict[str, Tensor] = {}
        for shard in self._shards:
            away = [
                name
                for weight in names
                if (parts := self._quantised[weight])[NUMBERS] not in shard.tensors
                for name in parts.values()
                if name in shard.tensors
            ]
            if away:
                with shard.opened() as read:
                    found.update((name, read(name, regions[name]).clone()) for name in away)
        return found

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        return {name: each for shard in self._shards for name, each in shard.tensors.items()}

    @cached_property
    def _quantised(self) -> dict[str, dict[str, str]]:
        """Names of the tensors of quantised weights, by weight and role."""
        return {} if self._format is None else self._format.grouped(self._stored)

    @cached_property
    def _plain(self) -> dict[str, StoredTensor]:
        """What is stored and read as it is."""
        parts = {name for parts in self._quantised.values() for name in parts.values()}
        unused = () if self._format is None else self._format.unused
        return {
            name: each
            for name, each in self._stored.items()
            if name not in parts and not name.endswith(unused)
        }

    def _scheme(self, name: str, slots: Mapping[str, Slot]) -> Scheme | None:
        """Return how a quantised weight is stored; None if not as its format says."""
        assert self._format is not None
        parts = {role: self._stored[part] for role, part in self._quantised[name].items()}
        return self._format.scheme(slots[name].shape, parts)

    def _is_bias_of_zeros(self, name: str) -> bool:
        """Whether it is a bias beside a quantised weight that adds nothing, as GPTQ may store."""
        weight = name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or weight not in self._quantised:
            return False
        return not any(bool(bias.any()) for bias in self._whole(name))


def _untied() -> ConfigError:
    return ConfigError(
        f"config.json: tie_word_embeddings is True, but {_HEAD} differs from {_EMBEDDING}: set it "
        "to false to use both, or remove the head",
        param="model",
    )


def _digest_with(form: QuantisedFormat, digest: str) -> str:
    """Return the digest of files that a format widens."""
    return hashlib.sha256(f"{digest}\0{form}".encode()).hexdigest()[:32]


class DummyWeights:
    """Random weights: normal with a given standard deviation, norms one.

    Each tensor depends only on the seed and its own name: it is drawn whole, then cut, so that the
    number of ranks changes nothing.

    Args:
        std: Standard deviation.
        dtype: Dtype of the tensors.
        identity: Part of the digest beside the seed: the model's shape.
    """

    def __init__(self, *, seed: int, std: float, dtype: torch.dtype, identity: str) -> None:
        self._seed = seed
        self._std = std
        self._dtype = dtype
        self._identity = identity

    def digesting(self, world: World) -> AbstractContextManager[Callable[[], str]]:
        """See `WeightSource`: covers shape, seed, deviation and dtype."""
        text = f"dummy\0{self._identity}\0{self._seed}\0{self._std}\0{_SAME_DTYPE[self._dtype]}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return nullcontext(lambda: digest)

    @property
    def dtype(self) -> torch.dtype:
        """The requested dtype."""
        return self._dtype

    def check(
        self, slots: Mapping[str, Slot], *, tied_head: bool, unused: tuple[str, ...] = ()
    ) -> None:
        """See `WeightSource`; random weights always fit."""

    def tensors(self, slots: Mapping[str, Slot]) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""
        for name, slot in slots.items():
            if slot.load is None:
                continue
            region = slot.region or (slice(None),) * len(slot.shape)
            if name.endswith("norm.weight"):
                yield name, torch.ones(slot.shape, dtype=self._dtype)[region]
                continue
            key = hashlib.sha256(f"{self._seed}\0{name}".encode()).digest()
            generator = torch.Generator().manual_seed(
                int.from_bytes(key[:8], "little", signed=True)
            )
            drawn = torch.randn(slot.shape, generator=generator).mul_(self._std)
            yield name, drawn[region].to(self._dtype)
