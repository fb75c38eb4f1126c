"""Tokenizers of a few hundred pieces, as files: byte-level (as Qwen's and Llama 3's), with space marks (as Llama 2's),
and SentencePiece."""
from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [f"the cat number {i} sat on the mat and the readers of this test saw {i} words" for i in range(100)]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Drops the thoughts of earlier turns, and forces the beginning of the answer."""
BOS, EOS, IM_START, IM_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"


def byte_level(folder: Path, *, add_bos: bool = True, **config) -> Path:
    """A Hugging Face folder whose base alphabet is bytes; `config` is for its tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, IM_START, IM_END]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE} | config
    return _write(folder, tokenizer, config)


def space_marked(folder: Path, **config) -> Path:
    """A Hugging Face folder whose pieces mark spaces, with a byte for every unknown character."""
    alphabet = sorted({char for text in TEXTS for char in text.replace(" ", "\u2581")})
    vocab = {"<unk>": 0, BOS: 1, EOS: 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in [*alphabet, "th", "the", "\u2581the", "\u2581t", "\u2581th", "\u2581c", "\u2581ca", "\u2581cat"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("t", "h"), ("th", "e"), ("\u2581", "c")]
    merges += [("\u2581c", "a"), ("\u2581ca", "t")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", BOS, EOS)])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>"} | config
    return _write(folder, tokenizer, config)


def sentence_piece(folder: Path, **options) -> Path:
    """A SentencePiece .model with control and user-defined pieces and a byte for every unknown character."""
    folder.mkdir(exist_ok=True)
    facts = {"vocab_size": 340, "model_type": "bpe", "byte_fallback": True, "control_symbols": ["ctl"]}
    facts |= {"user_defined_symbols": ["<|user|>", "<|tool|>"], "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "tokenizer"), **facts
    )
    return folder / "tokenizer.model"


def _write(folder: Path, tokenizer: Tokenizer, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
