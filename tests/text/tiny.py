"""Small tokenizers of the kinds that models have, trained on a few sentences in no time."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Prefill and decode run on separate engines; the cache moves between them.",
    "Once upon a time there was a small model that answered in words.",
    "Ein Hund, zwei Hunde. Où est le chien? 你好，世界。",
]

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('the role ' + message.role + ' is not known') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@functools.cache
def byte_level_json() -> str:
    """GPT-2's kind: every byte is a token, text is concatenated bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", " spaced out "])
    return backend.to_str()


@functools.cache
def byte_fallback_json() -> str:
    """Llama 2's kind: words begin with U+2581, unknown characters become byte tokens."""
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False
    )
    trained.train_from_iterator(CORPUS[:3], trainer)
    described = json.loads(trained.to_str())
    described["model"]["byte_fallback"] = True
    described["added_tokens"] = [
        token for token in described["added_tokens"] if not token["content"].startswith("<0x")
    ]
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend.to_str()


@functools.cache
def metaspace_json() -> str:
    """T5's kind: a Metaspace decoder, no byte tokens."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


@functools.cache
def word_piece_json() -> str:
    """BERT's kind: pieces inside a word begin with ##."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


KINDS = {
    "byte_level": byte_level_json,
    "byte_fallback": byte_fallback_json,
    "metaspace": metaspace_json,
    "word_piece": word_piece_json,
}


def make_tokenizer(kind: str = "byte_level") -> Tokenizer:
    """Return a tokenizer of one of `KINDS`."""
    return Tokenizer(
        tokenizers.Tokenizer.from_str(KINDS[kind]()),
        {"bos_token": "<s>", "eos_token": "</s>"},
        CHAT_TEMPLATE,
    )


def write_model_files(directory: Path, *, kind: str = "byte_level") -> Path:
    """Write the text side of a model's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(KINDS[kind](), encoding="utf-8")
    tokenizer = make_tokenizer(kind)
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_token_id}),
        encoding="utf-8",
    )
    return directory
