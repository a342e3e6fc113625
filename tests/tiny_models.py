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


def write_tiny_model(directory: Path, family: str = "llama", **fields: Any) -> Path:
    """Save a random model of `family` (a key of `CLASSES`) and a byte tokenizer."""
    import torch
    import transformers

    config_name, model_name = CLASSES[family]
    torch.manual_seed(11)
    config = getattr(transformers, config_name)(**{**_SHAPE, **FIELDS_OF.get(family, {}), **fields})
    model = getattr(transformers, model_name)(config).eval()
    for name, parameter in model.named_parameters():
        # transformers starts biases at 0 and norms at 1, which would hide a lost one.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    model.save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
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


@one_thread()
def margins_by_transformers(
    directory: Path, prompt: list[int], output: list[int]
) -> list[tuple[int, float]]:
    """For each output position, the likeliest token and its lead in logits over the next.

    The weights are rounded to bf16 and the arithmetic is fp32, with `output` fed as it is:
    what an engine that computes in bf16 approximates.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float()
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
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
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
