"""Tiny random models with a tokenizer, as directories a command can serve.

At `initializer_range` 0.25 their tokens vary with the context, so that equality of outputs
proves something; every byte has a token, so that any text can be a prompt.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCAB_SIZE = 320
EOS_TOKEN_ID = 2

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "dots1": ("Dots1Config", "Dots1ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "glm": ("GlmConfig", "GlmForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
}
"""Of transformers: a family's configuration and its model."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}

_GLM4: dict[str, Any] = {"head_dim": 24, "pad_token_id": 0}

_GEMMA3: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": 20,
    "query_pre_attn_scalar": 40,
    "tie_word_embeddings": False,
    "sliding_window_pattern": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

FIELDS_OF: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **_LATENT,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
    },
    "deepseek_v3": {**_LATENT, "n_shared_experts": 1},
    "glm4_moe": {
        "head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe_lite": {**_LATENT, "n_group": 1, "topk_group": 1},
    "phi3": {"pad_token_id": 0},
    "ministral3": {
        "head_dim": 24,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e5,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "hunyuan_v1_dense": {
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "dynamic",
            "factor": 1.0,
            "alpha": 50.0,
            "rope_theta": 1e4,
        },
    },
    "hunyuan_v1_moe": {
        "head_dim": 24,
        "num_experts": 8,
        "moe_topk": 3,
        "intermediate_size": 40,
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
    },
    "glm": _GLM4,
    "glm4": _GLM4,
    "smollm3": {"pad_token_id": 0, "tie_word_embeddings": False, "no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    "ernie4_5": {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False},
    "ernie4_5_moe": {
        "tie_word_embeddings": False,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
    },
    "minimax_m2": {
        "head_dim": 24,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
    },
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 20,
        "max_window_layers": 2,
    },
    "olmo3": {
        "sliding_window": 20,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "exaone4": {"sliding_window": 20, "sliding_window_pattern": 2},
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "sliding_window": 20,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    },
}
"""What a family has beyond the shape of all."""


_OF_DECODERS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "image_token_index": 3,
    },
    "gemma3": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 3,
    },
}
"""Families that also read images, whose shape is that of their decoder, and what else they have."""


def make_tiny_config(family: str, **fields: Any) -> Any:
    """Configure `family` (a key of `CLASSES`) with the fields of its decoder."""
    import transformers

    make = getattr(transformers, CLASSES[family][0])
    if family in _OF_DECODERS:
        tied = fields.get("tie_word_embeddings", True)
        return make(text_config=fields, tie_word_embeddings=tied, **_OF_DECODERS[family])
    return make(**fields)


def vary(model: Any) -> None:
    """Draw what transformers starts at 0 or at 1, which would hide a lost parameter."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif "norm" in name:
            less_one = not parameter.any()
            torch.nn.init.normal_(parameter, mean=0.0 if less_one else 1.0, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)


def write_tiny_model(directory: Path, family: str = "llama", **fields: Any) -> Path:
    """Save a random model of `family` (a key of `CLASSES`) and a byte tokenizer."""
    import torch
    import transformers

    fields = {**_SHAPE, **FIELDS_OF.get(family, {}), **fields}
    torch.manual_seed(11)
    config = make_tiny_config(family, **fields)
    model = getattr(transformers, CLASSES[family][1])(config).eval()
    vary(model)
    model.save_pretrained(directory)
    write_tokenizer(directory, fields["vocab_size"])
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer of bytes, and of made-up words for all further ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġw{index}" for index in range(len(words), vocab_size)]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "chat_template": (
                    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
                    "{% if add_generation_prompt %}[assistant]{% endif %}"
                ),
            }
        )
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: several that wait for one another take minutes on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def model_of(directory: Path, dtype: Any = None) -> Any:
    """Load a model into transformers; in fp32 unless told otherwise."""
    import torch
    import transformers

    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(directory, dtype=dtype or torch.float32)


@one_thread()
def margins_by_transformers(
    directory: Path, prompt: list[int], output: list[int]
) -> list[tuple[int, float]]:
    """For each output position, the likeliest token and its lead in logits over the next.

    The weights are rounded to bf16 and the arithmetic is fp32, with `output` fed as it is:
    what an engine that computes in bf16 approximates.
    """
    import torch

    model = model_of(directory, torch.bfloat16).float()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    leads = (best.values[:, 0] - best.values[:, 1]).tolist()
    return list(zip(best.indices[:, 0].tolist(), leads, strict=True))


@one_thread()
def greedy_by_transformers(
    directory: Path, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """What transformers generates in fp32, EOS ignored: the oracle."""
    import torch

    model = model_of(directory)
    outputs = []
    for prompt in prompts:
        with torch.no_grad():
            tokens = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs
