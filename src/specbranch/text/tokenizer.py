"""Text to token ids and back, over the `tokenizers` library alone: a folder with tokenizer.json loads without
transformers or torch.

Owns the tokenizer files of a model, its special tokens and the ids that end a text. Invariant: ids, text and rendered
chats are those that transformers gives for the same files. One exception: spaces before punctuation are never cleaned
up. That is meant for WordPiece encoders, and could change text after it was shown.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from specbranch.errors import BadParameter, ModelError
from specbranch.file_values import FileValues, read_object
from specbranch.text.byte_letters import TokenBytes
from specbranch.text.chat_template import ChatTemplate, Message
from specbranch.text.continuation import open_text
from specbranch.text.conversion import TOKENIZER, convert, file_key, folder_key, kept_folder
from specbranch.text.detokenizer import TokenDecoder
from specbranch.text.longest_token import TextBound, text_bound

TOKEN_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
_LONG = 4096  # characters or ids that take about a millisecond or more
_log = logging.getLogger("specbranch")


class Tokenizer:
    """One model's vocabulary, in both directions."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """`tool_template`: the chat template for requests with tools, if the model has one of its own for them."""
        self._backend = backend
        self.special = dict(special)
        self.eos_ids = tuple(eos_ids)
        self._template = None if chat_template is None else ChatTemplate(chat_template, special)
        self._tool_template = self._template if tool_template is None else ChatTemplate(tool_template, special)
        self._shown: dict[frozenset[int], ShowingDecoder] = {}
        self._warned = False

    @classmethod
    def from_folder(cls, path: Path | str, cache_folder: Path | None = None) -> Self:
        """Load from a model's folder. Without tokenizer.json it is converted by transformers and kept in
        `cache_folder`, if given."""
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(
                f"No tokenizer at {folder}: there is no such folder. Give the folder that holds {TOKENIZER}."
            )
        if (folder / TOKENIZER).is_file():
            return cls._load(folder)
        _log.warning("No %s in %s: converting its tokenizer with transformers, once.", TOKENIZER, folder)
        with kept_folder(cache_folder, folder_key(folder)) as kept:
            if not (kept / TOKENIZER).is_file():
                convert(folder, kept, None)
            return cls._load(kept)

    @classmethod
    def from_gguf(cls, path: Path | str, cache_folder: Path) -> Self:
        """Load from a GGUF file. The first time transformers converts it into `cache_folder`; later the file is not
        even opened."""
        file = Path(path)
        if not file.is_file():
            raise ModelError(f"No model at {file}: there is no such file.")
        with kept_folder(cache_folder, file_key(file)) as kept:
            if not (kept / TOKENIZER).is_file():
                _log.info("Converting the tokenizer of %s, once.", file.name)
                convert(file.parent, kept, file.name)
            return cls._load(kept, by_file=True)

    @classmethod
    def _load(cls, folder: Path, by_file: bool = False) -> Self:
        """Load a converted folder. `by_file`: the end tokens come from the GGUF file, if it names any; versions of
        transformers differ in what they take instead."""
        config = _settings(folder / "tokenizer_config.json")
        special = _special_tokens(config, _settings(folder / "special_tokens_map.json"))
        backend = _backend(folder / TOKENIZER, config, special)
        listed = by_file and (folder / "generation_config.json").is_file()
        endings = _eos_ids(folder, backend, {} if listed else special)
        return cls(
            backend, special, endings, _chat_template(folder, config), _chat_template(folder, config, "tool_use")
        )

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of a text, with whatever the model puts around one (usually a BOS, or nothing) if
        `add_special`."""
        check_text(text)
        if len(text) < _LONG:
            return list(self._backend.encode(text, add_special_tokens=add_special).ids)
        # the library releases the GIL for a batch, but not for one text; so other threads can run
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of some ids; bytes that make no character become U+FFFD."""
        if len(ids) < _LONG:
            return self._backend.decode(ids, skip_special_tokens=skip_special)
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]  # without the GIL, too

    def definition(self) -> str:
        """Return the tokenizer as tokenizer.json would have it, with the tokens that other files added."""
        return self._backend.to_str()

    def token(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; an id without one (padding) gives an empty string."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return self._template is not None

    @property
    def dates_chats(self) -> bool:
        """True if the chat template may write the date; then another day gives other ids."""
        return self._template is not None and "strftime_now" in self._template.source

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template."""
        return self._template

    @property
    def tool_template(self) -> ChatTemplate | None:
        """The chat template for requests with tools."""
        return self._tool_template

    def added_id(self, text: str) -> int | None:
        """Return the added token that a text is, special or not; None if it is none."""
        found = self._backend.token_to_id(text)
        return found if found in self._added_ids else None

    def special_among(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the special tokens among some texts: those that decoding skips."""
        found = (self._backend.token_to_id(text) for text in texts)
        return frozenset(token_id for token_id in found if token_id in self.special_ids)

    def showing(self, token_ids: frozenset[int]) -> TokenDecoder:
        """Return a decoder that skips special tokens, but not these."""
        if token_ids not in self._shown:
            self._shown[token_ids] = ShowingDecoder(self, token_ids)
        return self._shown[token_ids]

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation; the template writes a BOS where the model wants one, so none is added."""
        text = self.chat_text(messages, add_generation_prompt, tools, variables, continue_final_message)
        return self.encode(text, add_special=not self.has_chat_template)

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a conversation; `chat` returns its ids. With `continue_final_message` it ends with the
        last message, whatever `add_generation_prompt` says."""
        _check_messages(messages)
        if continue_final_message:
            return open_text(messages, lambda said: self.chat_text(said, False, tools, variables))
        template = self._tool_template if tools else self._template
        if template is None:
            return self._plain_chat(messages, add_generation_prompt)
        return template.render(messages, add_generation_prompt, tools, variables)

    def _plain_chat(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if not self._warned:
            self._warned = True
            warnings.warn("This model has no chat template: the messages are given to it as plain text.", stacklevel=4)
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)

    @cached_property
    def _vocabulary(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}

    def vocabulary(self) -> dict[int, str]:
        """Return every token by its id."""
        return dict(self._vocabulary)

    @cached_property
    def vocabulary_size(self) -> int:
        """One more than the highest id."""
        return max(self._vocabulary, default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the vocabulary: equal where all ids mean the same."""
        return sha256(json.dumps(sorted(self._vocabulary.items())).encode()).hexdigest()

    @cached_property
    def _bound(self) -> TextBound | None:
        return text_bound(json.loads(self._backend.to_str()))

    def least_tokens(self, text: str) -> int:
        """Return the least number of tokens of a text by its characters alone; 0 if they prove nothing."""
        return 0 if self._bound is None else self._bound.least(text)

    def merged(self, word: str) -> list[int]:
        """Return the ids of a word in the vocabulary's own letters, by the model's merges alone."""
        return [int(token.id) for token in self._backend.model.tokenize(word)]

    def words(self, text: str) -> list[str]:
        """Cut a text into the words that are merged each by itself, in the vocabulary's own letters."""
        cutter = self._backend.pre_tokenizer
        return [text] if cutter is None else [word for word, _ in cutter.pre_tokenize_str(text)]

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, which decoding may skip."""
        return frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

    def is_silent(self, token_id: int, skip_special: bool = True) -> bool:
        """Return True if decoding skips the token as if it were not there."""
        return (skip_special and token_id in self.special_ids) or self._backend.id_to_token(token_id) is None

    def token_bytes(self, skip_special: bool = True) -> TokenBytes | None:
        """Return the bytes of each token, if the text of tokens is that of their bytes; None for other decoders."""
        return self._token_bytes[skip_special]

    @cached_property
    def _token_bytes(self) -> dict[bool, TokenBytes | None]:
        decoder = self._backend.decoder
        if decoder is None or json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
            return {True: None, False: None}

        def spell(token_id: int) -> str:
            return "" if token_id in self.special_ids else self.token(token_id)

        return {True: TokenBytes(spell), False: TokenBytes(self.token)}

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The tokens that stand for one byte each and are decoded run by run (SentencePiece's byte fallback)."""
        decoder = self._backend.decoder
        if decoder is None or b"ByteFallback" not in decoder.__getstate__():
            return frozenset()
        spelled = {f"<0x{value:{digits}}>" for value in range(256) for digits in ("02X", "02x")}
        found = [self._backend.token_to_id(token) for token in spelled]
        return frozenset(token_id for token_id in found if token_id is not None)


class ShowingDecoder:
    """A tokenizer as detokenizing sees it, with some special tokens as text: markers that a parser looks for."""

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int]) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self.byte_ids = tokenizer.byte_ids
        self._bytes = None if tokenizer.token_bytes() is None else TokenBytes(self._spell)

    def token_bytes(self, skip_special: bool = True) -> TokenBytes | None:
        """Return the bytes of each token, if the text of tokens is that of their bytes; None for other decoders."""
        return self._bytes if skip_special else self._tokenizer.token_bytes(False)

    def is_silent(self, token_id: int, skip_special: bool = True) -> bool:
        """Return True if decoding skips the token as if it were not there."""
        return self._tokenizer.is_silent(token_id, skip_special and token_id not in self._shown)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of some ids."""
        kept = [token_id for token_id in ids if not self.is_silent(token_id, skip_special)]
        return self._tokenizer.decode(kept, skip_special=False)

    def _spell(self, token_id: int) -> str:
        return "" if self.is_silent(token_id) else self._tokenizer.token(token_id)


def check_text(text: str, what: str = "The text") -> None:
    """Refuse a text with half of a surrogate pair: Python makes one of a byte that is not UTF-8, and no tokenizer
    takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadParameter(
            f"{what} is not valid UTF-8: character {error.start} is {text[error.start]!a}. Save or type it as UTF-8."
        ) from None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise BadParameter("The conversation is empty; give at least one message.")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise BadParameter(f"A message is {message!r}; expected a mapping with 'role' and 'content'.")
        if "content" not in message and "tool_calls" not in message:
            raise BadParameter(f"The {message['role']} message has no 'content'.")


def _settings(path: Path) -> FileValues:
    """Return the values of a file; none if there is no file."""
    return FileValues(read_object(path) if path.is_file() else {}, str(path))


def _backend(path: Path, config: FileValues, special: Mapping[str, str]) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is damaged ({error}). Fetch the model again.") from error
    backend.no_truncation()  # a file may carry both from its training run
    backend.no_padding()
    _add_missing(backend, config, special)
    return backend  # tokenizer.json alone says what goes around a text; `add_bos_token` is ignored


def _add_missing(backend: tokenizers.Tokenizer, config: FileValues, special: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json knows, and mark the named ones as special."""
    listed = config.group("added_tokens_decoder")
    for number in sorted(listed.values, key=lambda key: _token_id(listed, key)):
        entry = listed.group(number)
        if backend.token_to_id(entry.text("content")) is None:
            switches = {name: entry.flag(name, False) for name in TOKEN_SWITCHES if name in entry.values}
            backend.add_tokens([AddedToken(entry.text("content"), **switches)])
    names = [*special.values(), *_extra_special(config)]
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names if name not in already]
    )


def _token_id(listed: FileValues, key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        listed.refuse(key, "whole numbers as its keys")
    return int(key)


def _extra_special(config: FileValues) -> list[str]:
    key = "additional_special_tokens" if config.get("additional_special_tokens") else "extra_special_tokens"
    if isinstance(config.get(key), Mapping):
        several = config.group(key)
    else:
        several = FileValues(_numbered(config.items(key)), config.name, f"{key}.")
    return [_content(several, name) for name in several.values]


def _numbered(items: Sequence[Any]) -> dict[str, Any]:
    return {str(number): item for number, item in enumerate(items)}


def _content(tokens: FileValues, key: str) -> str:
    """A token's text, which may be one of its settings."""
    return tokens.group(key).text("content") if isinstance(tokens.get(key), Mapping) else tokens.text(key)


def _special_tokens(config: FileValues, legacy: FileValues) -> dict[str, str]:
    """Return the special tokens by name. The older special_tokens_map.json counts, unless the newer file lists its
    added tokens."""
    files = (legacy, config) if "added_tokens_decoder" in config.values else (config, legacy)
    return {
        key: _content(file, key)
        for file in files
        for key, token in file.values.items()
        if key.endswith("_token") and isinstance(token, (str, Mapping))  # others are switches, as add_bos_token
    }


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """Return every id that ends a text: those of generation_config.json (or config.json), then the tokenizer's own."""
    listed = _settings(folder / "generation_config.json").ids("eos_token_id")
    listed = listed or _settings(folder / "config.json").ids("eos_token_id")
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return tuple(dict.fromkeys((*listed, *(() if own is None else (own,)))))


def _chat_template(folder: Path, config: FileValues, name: str = "default") -> str | None:
    """Return the template of a name. A folder with a single template has only the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        if name != "default":
            return None
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} is damaged and could not be read: {error}. Fetch the model again.") from None
    own = _settings(folder / "chat_template.json")
    held = own if own.get("chat_template") else config
    if isinstance(held.get("chat_template"), list):  # several by name
        several = FileValues(_numbered(held.items("chat_template")), held.name, "chat_template.")
        templates = [several.group(number) for number in several.values]
        return next((entry.text("template") for entry in templates if entry.get("name") == name), None)
    return (held.text("chat_template", "") or None) if name == "default" else None
