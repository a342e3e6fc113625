"""`ModelArch`: the dimensions and options of a model, as one frozen struct.

Free of torch. Knows neither weights nor devices, nor the file it was read from (`reading`).
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

from pdserve.errors import ConfigError
from pdserve.kernels.gates import Activation


class RopeKind(enum.Enum):
    """How rotary frequencies are stretched beyond the length that a model was trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class RopeArch(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al. 2021, and its scalings).

    Attributes:
        theta: Base of the wavelengths.
        factor: How many times longer the context becomes; 1 for the default kind.
        original_max_positions: Context of the pretraining, for llama3 and yarn.
        low_freq_factor, high_freq_factor: The two limits of llama3.
        beta_fast, beta_slow: The two limits of yarn, in rotations (Peng et al. 2023, section 3.2).
        attention_factor: yarn's factor on cosine and sine; 1 elsewhere.
        truncate: Whether yarn rounds its limits to whole dimensions.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class FarQueriesArch(msgspec.Struct, frozen=True, kw_only=True):
    """A factor on queries far from the start: `1 + beta * log(1 + floor(position / period))`."""

    beta: float
    period: int


class QkNorm(enum.Enum):
    """Norms of queries and keys."""

    NONE = "none"
    HEAD = "head"
    """Of each head, all with one weight."""
    ALL_HEADS = "all_heads"
    """Of all heads of queries together, and of all of keys."""
    ROTATED_HEAD = "rotated_head"
    """Of each head, after rotation."""


class NormArch(msgspec.Struct, frozen=True, kw_only=True):
    """Where a layer's RMS norms are, and how they multiply.

    Attributes:
        before: Whether each half norms the stream that it reads.
        after: Whether each half's result is normed before it is added to the stream.
        wide: Whether weights multiply in fp32, before the only rounding.
        less_one: Whether weights are stored less 1.
    """

    before: bool = True
    after: bool = False
    wide: bool = False
    less_one: bool = False


class Scoring(enum.Enum):
    """How a router's logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(enum.Enum):
    """The value that ranks a group of experts."""

    MAX = "max"
    SUM_OF_TOP_2 = "sum_of_top_2"


class GluArch(msgspec.Struct, frozen=True, kw_only=True):
    """gpt-oss's gate, `(up + 1) * gate * sigmoid(alpha * gate)`, of clamped values.

    Attributes:
        alpha: Factor in the sigmoid.
        limit: `gate` is at most this, and `up` between this and its negative.
    """

    alpha: float
    limit: float


class MoeArch(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts layers of a model.

    Attributes:
        layers: For each layer, whether it has experts; the others have a dense MLP.
        top_k: Experts per token.
        intermediate_size: Intermediate size of one expert.
        shared_intermediate_size: Total of the shared experts; 0 = there are none.
        scoring: How logits become scores.
        normalize_weights: Whether the chosen scores are divided by their sum.
        routed_scaling_factor: Factor on the weights, after that.
        num_groups, top_k_groups: Only the experts of the best groups may be chosen
            (DeepSeek-V2, section 2.2.2); 1 and 1 = no groups.
        group_score: The value that ranks a group.
        has_correction_bias: Whether a bias per expert affects the choice, but not the weights
            (DeepSeek-V3, section 2.1.2).
        shared_gate: Whether the shared experts' result has a factor of its own, a sigmoid.
        router_bias: Whether the router's logits have a bias.
        experts_bias: Whether the experts' matrices have biases.
        glu: The experts' gate; None is SiLU's.
    """

    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    scoring: Scoring = Scoring.SOFTMAX
    normalize_weights: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    has_correction_bias: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    experts_bias: bool = False
    glu: GluArch | None = None


class MlaArch(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): it caches one latent per token.

    Attributes:
        q_lora_rank: Rank of the compressed query; None = it is not compressed.
        kv_lora_rank: Rank of the latent that keys and values are made from.
        qk_nope_head_dim, qk_rope_head_dim: Parts of a query and key head.
        v_head_dim: Dimension of a value head.
        interleaved_rope: Whether rotated dimensions are paired as neighbours.
        softmax_scale: Factor on the scores, including that of yarn.
        lora_norm_eps: Epsilon of the norms of the compressed query and of the latent; a constant of
            the family, independent of `rms_norm_eps`.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    interleaved_rope: bool = True
    lora_norm_eps: float = 1e-6


class ModelArch(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer, whole (before any slicing over ranks).

    Attributes:
        architecture: Class name in `config.json`; the key of the model registry.
        head_dim: May differ from `hidden_size / num_heads`.
        tie_embeddings: Whether the output head is the embedding.
        partial_rotary_factor: Share of each head that is rotated, its first elements; `mla` says
            for itself.
        qk_norm: What has an RMS norm, before rotation unless it says otherwise.
        qkv_bias, o_bias, mlp_bias: Which linear layers have a bias.
        attention_sinks: Whether each head has a score without a value.
        windows: Per layer: the sliding window in tokens (a token sees itself and the
            `window - 1` before it), or None for full attention.
        max_position_embeddings: As in `config.json`.
        eos_token_ids, bos_token_id: As in `config.json`; generation_config.json may name more.
        dtype: Dtype of the checkpoint, as torch names it; None if the config has none.
        initializer_range: Standard deviation of dummy weights.
        moe: Its mixture-of-experts layers, if it has any.
        mla: Its latent attention; then `num_kv_heads` is 1 and `head_dim` is the cached size of a
            token (`kv_lora_rank + qk_rope_head_dim`).
        norms: Its layers' norms.
        activation: The gate of its dense layers.
        softmax_scale: Factor on the scores of grouped queries; None: `head_dim ** -0.5`.
        embedding_scale: Factor on embeddings, rounded to the model's dtype.
        residual_scale: Factor on what each half adds to the stream.
        logits_scale: Factor on the logits.
        window_rope: Rotation in layers with a window; None: as in the others.
        far_queries: A factor on queries by their position, if there is one.
        unrotated: Layers whose queries and keys are not rotated.
        interleaved_rope: Whether rotated dimensions are paired as neighbours, of grouped queries.
        num_extra_layers: Layers that may follow these in checkpoints and predict further tokens
            (DeepSeek-V3, section 2.2); they draft (`models.mtp`), or are not read.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_embeddings: bool
    rope: RopeArch
    partial_rotary_factor: float
    qk_norm: QkNorm
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None
    initializer_range: float
    moe: MoeArch | None = None
    mla: MlaArch | None = None
    attention_sinks: bool = False
    norms: NormArch = NormArch()
    activation: Activation = Activation.SILU
    softmax_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    window_rope: RopeArch | None = None
    far_queries: FarQueriesArch | None = None
    unrotated: tuple[int, ...] = ()
    interleaved_rope: bool = False
    num_extra_layers: int = 0

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def rope_of(self, layer: int) -> RopeArch | None:
        """Rotation in a layer, if there is one."""
        if layer in self.unrotated:
            return None
        if self.window_rope is not None and self.windows[layer] is not None:
            return self.window_rope
        return self.rope

    @property
    def max_context_len(self) -> int:
        """Maximum tokens of a request, with the context extension of the rope scaling."""
        if self.window_rope is not None:
            return self.max_position_embeddings  # whatever stretches a part of the layers
        if self.rope.kind is RopeKind.LINEAR:
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind is RopeKind.YARN:
            extended = int(self.rope.original_max_positions * self.rope.factor)
            return max(self.max_position_embeddings, extended)
        return self.max_position_embeddings

    def require_ranks(self, *, tp: int, pp: int) -> None:
        """Refuse more ranks than there are heads, or more stages than layers, for them.

        Raises:
            ConfigError: There are more.
        """
        for flag, num_ranks, num_parts, parts, rank in (
            ("pipeline-parallel-size", pp, self.num_layers, "layers", "stage"),
            ("tensor-parallel-size", tp, self.num_heads, "attention heads", "rank"),
        ):
            if num_parts < num_ranks:
                raise ConfigError(
                    f"--{flag} is {num_ranks}, but the model has only {num_parts} {parts} and "
                    f"every {rank} needs one: use a smaller size",
                    param=flag,
                )

    @property
    def digest(self) -> str:
        """Short name of this shape; equal for equal shapes."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]
