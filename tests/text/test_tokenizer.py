"""The tokenizer gives what transformers gives, without it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_tokenizers import KINDS, SENTENCES, SPECIAL, byte_level, save
from specbranch.errors import BadParameter, ModelError
from specbranch.text.chat_template import ChatTemplate
from specbranch.text.conversion import GGUF_CLASSES, _tokenizer_class
from specbranch.text.detokenizer import Detokenizer
from specbranch.text.tokenizer import Tokenizer

TEXTS = [
    *SENTENCES,
    "",
    " ",
    "  two leading spaces",
    "trailing  ",
    "line\n\n\nbreaks\tand tabs",
    "special <s> tokens </s> inside<tool>text",
    "1234567890 3.14159",
    "العربية हिन्दी 日本語 한국어",
    "e\u0301 is not é; family 👨‍👩‍👧‍👦",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "1 < 2 & 3?"},
        {"role": "assistant", "content": "Yes."},
    ],
    [{"role": "user", "content": "小模型 🙂"}],
]


def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return reference(folder)


def test_ids_equal_those_of_transformers(tokenizer: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        for add_special in (True, False):
            assert tokenizer.encode(text, add_special) == theirs.encode(text, add_special_tokens=add_special), text


def test_decoded_text_equals_that_of_transformers(tokenizer: Tokenizer, theirs: Any) -> None:
    draw = random.Random(1)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocabulary_size) for _ in range(draw.randrange(12))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), ids


def test_chats_equal_those_of_transformers(tokenizer: Tokenizer, theirs: Any) -> None:
    for messages in CHATS:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert tokenizer.chat(messages, prompt) == expected
    tools = [{"name": "add", "description": "a < b & 'c'"}]
    assert tokenizer.chat(CHATS[0], tools=tools) == theirs.apply_chat_template(
        CHATS[0], tools=tools, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_the_file_says_whether_bos_is_added_not_the_setting_beside_it(tmp_path: Path, kind: str, bos: bool) -> None:
    folder = save(KINDS[kind](), tmp_path, add_bos_token=bos)
    ours = Tokenizer.from_folder(folder).encode("A branch is a guess")
    assert ours == reference(folder).encode("A branch is a guess")
    assert (ours[0] == 1) == (kind == "byte fallback")


def test_a_template_that_writes_bos_gives_one_bos(tmp_path: Path) -> None:
    found = Tokenizer.from_folder(save(KINDS["byte fallback"](), tmp_path))
    assert found.chat(CHATS[0]).count(1) == 1
    assert found.encode("Hello").count(1) == 1


def test_tokens_that_only_the_configuration_lists_are_known(tmp_path: Path) -> None:
    extra = {
        "content": "<think>",
        "special": False,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    made = byte_level()
    folder = save(
        made, tmp_path, added_tokens_decoder={str(made.get_vocab_size()): extra}, additional_special_tokens=["<pause>"]
    )
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    for text in ("<think>so</think>", "a <pause> b"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_limits_left_in_the_file_do_not_cut_or_pad(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    found = Tokenizer.from_folder(save(made, tmp_path))
    assert found.decode(found.encode(SENTENCES[0])) == SENTENCES[0]


def test_ending_ids_come_from_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    assert Tokenizer.from_folder(folder).eos_ids == (2,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.from_folder(folder).eos_ids == (5, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert Tokenizer.from_folder(folder).eos_ids == (7, 2, 9)


def test_older_special_tokens_map_is_read(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, bos_token=None, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    found = Tokenizer.from_folder(folder)
    assert found.special["bos_token"] == "<s>" and found.eos_ids == (2,)
    assert found.special == reference(folder).special_tokens_map


@pytest.mark.parametrize("listed", [True, False])
def test_where_both_files_name_a_token_the_same_one_holds_as_in_transformers(tmp_path: Path, listed: bool) -> None:
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = {"1": {"content": "<s>", **flags}, "2": {"content": "</s>", **flags}} if listed else None
    folder = save(byte_level(), tmp_path, eos_token="</s>", added_tokens_decoder=added)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<s>"}))
    found = Tokenizer.from_folder(folder)
    assert found.special == reference(folder).special_tokens_map
    assert found.special["eos_token"] == ("</s>" if listed else "<s>")


def test_template_file_goes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}", encoding="utf-8"
    )
    found = Tokenizer.from_folder(folder)
    assert found.decode(found.chat(CHATS[0])) == "<Hello>"
    assert found.chat(CHATS[0]) == reference(folder).apply_chat_template(CHATS[0], return_dict=False)


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    several = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain {{ messages[0]['content'] }}"},
    ]
    found = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=several))
    assert found.decode(found.chat(CHATS[0])) == "plain Hello"


def test_without_a_template_plain_text_is_used_and_said_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    found = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=None))
    assert not found.has_chat_template
    with pytest.warns(UserWarning, match="no chat template"):
        ids = found.chat(CHATS[0])
    assert found.decode(ids) == "user: Hello\nassistant:"
    recwarn.clear()
    found.chat(CHATS[0], add_generation_prompt=False)
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty"),
        ([{"role": "judge", "content": "x"}], "Unknown role judge"),
        ([{"content": "x"}], "'role'"),
        ([{"role": "user"}], "no 'content'"),
    ],
)
def test_bad_messages_get_a_sentence(
    byte_level_tokenizer: Tokenizer, messages: list[dict[str, str]], said: str
) -> None:
    with pytest.raises(BadParameter, match=said):
        byte_level_tokenizer.chat(messages)


@pytest.mark.parametrize(
    "attack",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].update({'role': 'x'}) }}", "{% for %}"],
)
def test_a_hostile_or_broken_template_gets_a_sentence(tmp_path: Path, attack: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises((BadParameter, ModelError), match="chat template"):
        found = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=attack))
        if found.decode(found.chat(messages)) == "":  # jinja's sandbox may also answer with nothing
            raise BadParameter("chat template wrote nothing")
    assert messages == [{"role": "user", "content": "Hello"}]


def test_missing_and_damaged_files_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no such file"):
        Tokenizer.from_gguf(tmp_path / "nothing.gguf", tmp_path)
    folder = save(byte_level(), tmp_path / "damaged")
    (folder / "tokenizer.json").write_text("{ cut off")
    with pytest.raises(ModelError, match="damaged"):
        Tokenizer.from_folder(folder)
    (tmp_path / "empty.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_gguf(tmp_path / "empty.gguf", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_a_folder_without_tokenizer_json_is_converted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, cache = tmp_path / "gpt2", tmp_path / "cache"
    made = byte_level()
    folder.mkdir()
    made.model.save(str(folder))  # vocab.json and merges.txt, as GPT-2 was published
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    first = Tokenizer.from_folder(folder, cache)
    assert "converting" in caplog.text and first.eos_ids == (2, 7)
    (kept,) = cache.iterdir()
    stamp = (kept / "tokenizer.json").stat().st_mtime_ns
    assert (
        Tokenizer.from_folder(folder, cache).encode(SENTENCES[1])
        == first.encode(SENTENCES[1])
        == made.encode(SENTENCES[1]).ids
    )
    assert (kept / "tokenizer.json").stat().st_mtime_ns == stamp


def test_loading_a_folder_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from specbranch.text.tokenizer import Tokenizer; t = Tokenizer.from_folder(sys.argv[1]);"
        "t.chat([{'role': 'user', 'content': 'x'}]); print([m for m in ('torch', 'transformers', 'numpy') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_token_and_vocabulary_agree(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary()
    assert max(vocabulary) + 1 == tokenizer.vocabulary_size
    assert all(tokenizer.token(token_id) == token for token_id, token in vocabulary.items())
    assert tokenizer.token(tokenizer.vocabulary_size + 10) == ""


def test_endings_of_a_gguf_are_read_past_its_arrays(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    from specbranch.text.conversion import _gguf_endings

    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list([token.encode() for token in SENTENCES])
    writer.add_token_scores([0.5] * 6)
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_eos_token_id(2)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_eot_token_id(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert _gguf_endings(tmp_path / "m.gguf") == [2, 4]


def gguf_with(architecture: str, path: Path) -> Path:
    """A GGUF without weights that holds the byte-level tokenizer."""
    from gguf import GGUFWriter, TokenType

    made = json.loads(byte_level().to_str())
    tokens = sorted(made["model"]["vocab"], key=made["model"]["vocab"].__getitem__)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if architecture.startswith("qwen") else "default")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge).encode() for merge in made["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", [*GGUF_CLASSES, "falcon"])
def test_a_gguf_is_read_by_the_class_that_transformers_chooses(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = gguf_with(architecture, tmp_path / "m.gguf")
    chosen = _tokenizer_class(tmp_path, path.name)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    assert chosen is (type(theirs) if architecture in GGUF_CLASSES else AutoTokenizer)
    ours = Tokenizer.from_gguf(path, tmp_path / "cache")
    theirs.save_pretrained(tmp_path / "theirs")
    (kept,) = (tmp_path / "cache").iterdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (kept / file).read_text() == (tmp_path / "theirs" / file).read_text()
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_a_class_that_is_named_beside_a_gguf_is_used(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = gguf_with("llama", tmp_path / "m.gguf")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert _tokenizer_class(tmp_path, path.name) is AutoTokenizer


@pytest.mark.slow
@pytest.mark.default_model
def test_default_model_tokenizes_as_transformers_does_from_its_gguf(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from specbranch.models.files.store import pull

    path = pull("smollm2-135m")
    ours = Tokenizer.from_gguf(path, tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.chat(CHATS[1]) == theirs.apply_chat_template(CHATS[1], add_generation_prompt=True, return_dict=False)
    assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" in ours.decode(
        ours.chat(CHATS[0]), skip_special=False
    )
    assert ours.eos_ids == (theirs.eos_token_id,) and ours.vocabulary_size == len(theirs)
    (kept,) = tmp_path.iterdir()
    os.utime(kept / "tokenizer.json", (0, 0))
    assert Tokenizer.from_gguf(path, tmp_path).fingerprint == ours.fingerprint
    assert (kept / "tokenizer.json").stat().st_mtime == 0  # not converted again


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    for text in ("a\ud800b", "\udcff"):
        with pytest.raises(BadParameter, match="not valid UTF-8"):
            tokenizer.encode(text)
        with pytest.raises(BadParameter, match="not valid UTF-8"):
            tokenizer.chat([{"role": "user", "content": text}])
    assert tokenizer.decode(tokenizer.encode("\U0001f642", add_special=False)) != ""


def test_what_ends_a_text_is_what_the_gguf_says(tmp_path: Path) -> None:
    """Some version of transformers takes another token for the tokenizer's own end."""
    path = gguf_with("llama", tmp_path / "m.gguf")
    ours = Tokenizer.from_gguf(path, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    config = json.loads((kept / "tokenizer_config.json").read_text())
    (kept / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<s>"}))
    assert len(ours.eos_ids) == 1 and Tokenizer.from_gguf(path, tmp_path / "cache").eos_ids == ours.eos_ids


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_shown_are_text_and_others_are_not(kind: str) -> None:
    backend = KINDS[kind]()
    backend.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>"})
    shown = tokenizer.special_among(["[TOOL_CALLS]", "branch", "<never>"])
    assert len(shown) == 1
    parts = [tokenizer.encode(text, add_special=False) for text in ("A branch", "[OTHER]", "[TOOL_CALLS]", "guess")]
    ids = [token for part in parts for token in part]
    reader = Detokenizer(tokenizer.showing(shown))
    text = reader.feed(ids) + reader.finish()
    assert "[TOOL_CALLS]" in text and "[OTHER]" not in text
    assert text.replace("[TOOL_CALLS]", "").replace(" ", "") == "Abranchguess"


def test_a_template_of_its_own_for_tools_is_used_for_them(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    templates = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, talk = Tokenizer.from_folder(tmp_path), [{"role": "user", "content": "x"}]
    assert tokenizer.chat_text(talk) == "plain" and tokenizer.chat_text(talk, tools=[{}]) == "1 tools"
    assert tokenizer.tool_template is not None and tokenizer.tool_template.takes_tools
    assert not ChatTemplate("These tools are text. {{ messages }}", {}).takes_tools
