"""Small tokenizers of each kind, trained on the spot and saved as a model's folder would hold them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from specbranch.text.detokenizer import TokenDecoder

SENTENCES = [
    "A branch is a guess about what the large model will say next.",
    "If the guess was right, nothing has to be done again; if not, the other branch is at hand.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "小模型先写，大模型再看，对的留下，错的重写。",
    "def accept(draft, target):\n    return [t for t, u in zip(draft, target) if t == u]\n",
    "Smile 🙂, laugh 😂, wave 👋🏽, and the flag of Brazil is 🇧🇷.",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] not in ['user', 'system', 'assistant'] %}{{ raise_exception('Unknown role ' + "
    "message.role) }}{% endif %}\n"
    "[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% if add_generation_prompt %}{% generation %}[assistant]{% endgeneration %}{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level(size: int = 420) -> Tokenizer:
    """The GPT-2 kind: tokens are bytes, a character may be split over several."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    made.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return made


def byte_fallback(size: int = 500) -> Tokenizer:
    """The Llama-2 kind: spaces are ▁, one is put before the text, and what has no token is written byte by byte."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = [sentence.replace(" ", "▁") for sentence in SENTENCES if sentence.isascii()]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(words, trainers.BpeTrainer(vocab_size=size, special_tokens=tokens))
    # the byte tokens are ordinary ones: the trainer knows no other way to reserve them
    plain = json.loads(made.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] in SPECIAL]
    made = Tokenizer.from_str(json.dumps(plain))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def metaspace(size: int = 300) -> Tokenizer:
    """The SentencePiece unigram kind."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        SENTENCES, trainers.UnigramTrainer(vocab_size=size, special_tokens=SPECIAL, unk_token="<unk>")
    )
    return made


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace}


class CountingDecoder:
    """A tokenizer that counts how many tokens it decodes."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self.decoded = 0
        self.byte_ids = tokenizer.byte_ids
        self._tokenizer = tokenizer

    def token_bytes(self, skip_special: bool = True) -> None:
        """None: all text is decoded here."""

    def is_silent(self, token_id: int, skip_special: bool = True) -> bool:
        return self._tokenizer.is_silent(token_id, skip_special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special)


def save(made: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write the files of a model's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **names, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder
