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
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from pdserve.errors import ConfigError
from pdserve.models.config_json import Fields, read_config
from pdserve.models.file_digest import DigestCache, FileDigest
from pdserve.models.mxfp4 import Mxfp4Format
from pdserve.models.quantised import read_quantised
from pdserve.models.shard_paths import shard_paths
from pdserve.models.weight_file import StoredTensor, WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from pdserve.models.fp8 import Fp8Format
    from pdserve.parallel.group import World

_DECODER = "model."
"""How tensors of a decoder with a head are named."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_DIGEST_THREADS = 4
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SAME_DTYPE = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Slot:
    """One named tensor of the checkpoint format, and the layer that takes it.

    Attributes:
        shape: As in the checkpoint, whole.
        load: Copies its argument, which is invalid after the call. None: the tensor belongs to
            another rank (its layer, its expert), and is not read here.
        region: This rank's part of the tensor, which is passed to `load`: one slice per dim,
            without steps. None is all of it.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None] | None
    region: tuple[slice, ...] | None = None

    def elsewhere(self) -> Slot:
        """The same tensor, as seen by a rank that owns none of it."""
        return Slot(self.shape, None)

    @property
    def num_elements(self) -> int:
        """Elements that this rank reads."""
        if self.load is None:
            return 0
        if self.region is None:
            return math.prod(self.shape)
        return math.prod(
            len(range(size)[part]) for size, part in zip(self.shape, self.region, strict=True)
        )


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

    def tensors(self, slots: Mapping[str, Slot]) -> Iterator[tuple[str, Tensor]]:
        """Yield the region of every slot that has a `load` once, on the CPU, cheapest first.

        A tensor is valid until the next one.
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
        load = slots[name].load
        assert load is not None
        load(tensor)
        done += tensor.numel()
        percent = 100 * done // total
        if percent >= reported + 10:
            reported = percent - percent % 10
            progress(f"weights {reported} %")


class Checkpoint:
    """The safetensors files of a model directory, with an index or without.

    Opening reads the files' headers only. Embedding models are saved without a head, and with
    tensor names relative to their decoder. FP8 and MXFP4 weights are widened.

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
        if isinstance(self._format, Mxfp4Format):
            for shard in self._shards:
                shard.tensors = self._format.named(shard.tensors)
        if not any(name.startswith(_DECODER) for shard in self._shards for name in shard.tensors):
            for shard in self._shards:
                shard.tensors = {_DECODER + name: each for name, each in shard.tensors.items()}

    @contextmanager
    def digesting(self, world: World) -> Iterator[Callable[[], str]]:
        """See `WeightSource`: covers every byte of every file, and the files' names."""
        files = FileDigest(
            [shard.path for shard in self._shards],
            cache=DigestCache.of_user(),
            world=world,
            num_threads=min(_MAX_DIGEST_THREADS, torch.get_num_threads()),
        )
        with closing(files):
            yield files.result

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements that are neither quantised nor scales."""
        counts: dict[str, int] = {}
        scales, form = set(self._scales.values()), self._format
        for shard in self._shards:
            for name, stored in shard.tensors.items():
                if name not in scales and not (form and stored.dtype == form.stored):
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
        return any(name in shard.tensors for shard in self._shards)

    def integers(self, name: str) -> Tensor | None:
        """Return a tensor that is not a weight, as int64; None if it does not exist."""
        slot = Slot((), lambda _: None)
        found = [each.to(torch.int64, copy=True) for _, each in self.tensors({name: slot})]
        return found[0] if found else None

    def check_tied_head(self) -> None:
        """Refuse a stored head that differs from the embedding, though config.json ties them.

        Both are compared as they are mapped; neither is copied.

        Raises:
            ConfigError: They differ, so transformers would not tie them.
        """
        slot = Slot((), lambda _: None)
        embeddings, heads = (self.tensors({name: slot}) for name in (_EMBEDDING, _HEAD))
        for (_, embedding), (_, head) in zip(embeddings, heads, strict=False):
            if embedding.dtype != head.dtype or not torch.equal(embedding, head):
                raise ConfigError(
                    f"config.json: tie_word_embeddings is True, but {_HEAD} differs from "
                    f"{_EMBEDDING}: set it to false to use both, or remove the head",
                    param="model",
                )

    def check(
        self, slots: Mapping[str, Slot], *, tied_head: bool, unused: tuple[str, ...] = ()
    ) -> None:
        """See `WeightSource`."""
        stored: dict[str, StoredTensor] = {}
        for shard in self._shards:
            for name, tensor in shard.tensors.items():
                if name in stored:
                    raise ConfigError(
                        f"tensor {name} is in two shards: it may be in only one", param="model"
                    )
                stored[name] = tensor
        scales, form = self._scales, self._format
        missing = [name for name in slots if name not in stored]
        unexpected = [
            name
            for name in stored.keys() - scales.values()
            if name not in slots
            and not name.endswith("rotary_emb.inv_freq")
            and not (form is not None and name.endswith(form.unused))
            and not (tied_head and name == _HEAD)
            and not name.startswith(unused)
        ]
        different = [
            f"{name} is {list(stored[name].shape)}, config.json says {list(slot.shape)}"
            for name, slot in slots.items()
            if name in stored and stored[name].shape != slot.shape
        ]
        different += [
            f"{scale} is {list(stored[scale].shape)}, its weight {list(stored[name].shape)}"
            for name, scale in scales.items()
            if form is not None
            and name in slots
            and not form.fits(stored[scale].shape, stored[name].shape)
        ]
        foreign = [
            f"{each} is {stored[each].dtype}"
            + (" and has no scale" if form and stored[each].dtype == form.stored else "")
            for name in slots
            if name in stored
            and stored[each := scales.get(name, name)].dtype
            not in (form.scale_dtypes if form and name in scales else _DTYPES)
        ]
        problems = [
            f"{text}: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else "")
            for text, names in (
                ("missing", missing),
                ("unexpected", sorted(unexpected)),
                ("of another shape", different),
                ("of an unsupported dtype", foreign),
            )
            if names
        ]
        if problems:
            raise ConfigError(
                f"the weights do not match config.json: {'; '.join(problems)}", param="model"
            )

    def tensors(self, slots: Mapping[str, Slot]) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`. Shard by shard, in the order of the data."""
        form, dtype = self._format, self.dtype
        wanted = {name: slot for name, slot in slots.items() if slot.load is not None}
        regions = {name: slot.region for name, slot in wanted.items()}
        if form is None:
            for shard in self._shards:
                yield from shard.read(regions)
            return
        for name in wanted.keys() & self._scales:
            regions[name] = form.weight_region(regions[name])
        scales = self._read_scales(form, wanted) if form.has_small_scales else {}
        for shard in self._shards:
            for name, tensor in shard.read(regions):
                if name not in self._scales:
                    yield name, tensor
                    continue
                slot = slots[name]
                if name not in scales:
                    scales = self._read_scales(form, {name: slot})
                shape, region = slot.shape, slot.region
                yield (
                    name,
                    form.widened(tensor, scales.pop(name), shape=shape, region=region, to=dtype),
                )

    @cached_property
    def _scales(self) -> dict[str, str]:
        """Names of the scales of quantised weights, by the weights' names."""
        if (form := self._format) is None:
            return {}
        stored = {name: each for shard in self._shards for name, each in shard.tensors.items()}
        return {
            name: scale
            for name, each in stored.items()
            if each.dtype == form.stored
            for scale in form.scale_names(name)
            if scale in stored
        }

    def _read_scales(
        self, form: Fp8Format | Mxfp4Format, slots: Mapping[str, Slot]
    ) -> dict[str, Tensor]:
        """Return the scales of some weights, by the weights' names."""
        weights = {scale: name for name, scale in self._scales.items() if name in slots}
        regions = {scale: form.scale_region(slots[name].region) for scale, name in weights.items()}
        return {
            weights[name]: tensor.clone()
            for shard in self._shards
            for name, tensor in shard.read(regions)
        }


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
