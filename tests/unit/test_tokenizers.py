"""Text to ids and back: the same ids as the libraries give, one BOS, and text that loses nothing but special tokens."""
import json

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer

from megatron_longstraw.data.tokenizers import TokenizerError, load_tokenizer
from megatron_longstraw.types import Branch
from tests import tiny_tokenizers
from tests.tiny_tokenizers import EOS, IM_END, IM_START

MAKERS = {
    "byte_level": tiny_tokenizers.byte_level,
    "space_marked": tiny_tokenizers.space_marked,
    "sentence_piece": tiny_tokenizers.sentence_piece,
}
CHAT = [{"role": "system", "content": "the readers"}, {"role": "user", "content": "the cat 🐈"}]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: make(folder / name) for name, make in MAKERS.items()}


@pytest.fixture(params=MAKERS)
def tokenizer(request, paths):
    return load_tokenizer(paths[request.param])


def hugging_face(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def without_bos(tokenizer, text):
    ids = tokenizer.encode(text)
    return ids[ids != tokenizer.bos_token_id]


TEXTS = ["the cat", " the  cat\n", "", "x\u0000é🐈", "the cat<s> the cat</s>", "\u2581the"]


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face_ids_are_those_of_the_file(paths, text):
    for name in ("byte_level", "space_marked"):
        expected = Tokenizer.from_file(str(paths[name] / "tokenizer.json")).encode(text).ids
        ids = load_tokenizer(paths[name]).encode(text)
        assert ids.dtype == np.int64 and ids.tolist() == expected


def test_hugging_face_class_that_cuts_texts_differently_is_not_asked(paths):
    """A model trained with the file would see other ids."""
    text = " the  cat"
    ids = load_tokenizer(paths["space_marked"]).encode(text).tolist()
    assert ids != hugging_face(paths["space_marked"])(text)["input_ids"]
    assert ids == Tokenizer.from_file(str(paths["space_marked"] / "tokenizer.json")).encode(text).ids


def test_folder_and_file_are_one_tokenizer(paths):
    folder, file = load_tokenizer(paths["byte_level"]), load_tokenizer(paths["byte_level"] / "tokenizer.json")
    assert file.eos_token_ids == folder.eos_token_ids == (1,)
    assert file.encode_chat(CHAT).tolist() == folder.encode_chat(CHAT).tolist()


def test_bare_tokenizer_json(paths, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes((paths["byte_level"] / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(file)
    assert tokenizer.encode("the cat").tolist() == load_tokenizer(paths["byte_level"]).encode("the cat").tolist()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (None, (), 320)
    with pytest.raises(TokenizerError, match="chat_template.jinja.*--tokenizer-model"):
        tokenizer.encode_chat(CHAT)


def test_one_bos(tokenizer):
    """Field case I06."""
    assert tokenizer.encode("the cat").tolist().count(tokenizer.bos_token_id) == 1
    if tokenizer.has_chat_template:
        assert tokenizer.encode_chat(CHAT).tolist().count(tokenizer.bos_token_id) == 1


def test_text_that_spells_its_bos_gets_no_other(paths):
    for name in ("byte_level", "space_marked"):
        ids = load_tokenizer(paths[name]).encode("<s>the cat").tolist()
        assert ids.count(ids[0]) == 1


@pytest.mark.parametrize(
    "options, has_bos",
    [
        ({}, 1),
        ({"add_bos_token": False}, 1),
        ({"add_bos_token": True, "add_bos": False}, 0),
        ({"bos_token": None}, 1),
    ],
)
def test_bos_is_the_choice_of_the_file(tmp_path, options, has_bos):
    path = tiny_tokenizers.byte_level(tmp_path / "x", **options)
    ids = load_tokenizer(path).encode("the cat").tolist()
    assert ids == hugging_face(path)("the cat")["input_ids"] and ids.count(0) == has_bos


def test_sentence_piece_without_bos_gets_none(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.sentence_piece(tmp_path / "x", bos_id=-1))
    ids = tokenizer.encode("the cat")
    assert tokenizer.bos_token_id is None and [tokenizer.decode([id]) for id in ids] == [" the", " cat"]


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], [*CHAT, {"role": "assistant", "content": "a"}, CHAT[1]]])
def test_chat_is_apply_chat_template(paths, chat):
    ids = load_tokenizer(paths["byte_level"]).encode_chat(chat)
    expected = hugging_face(paths["byte_level"]).apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids.dtype == np.int64 and ids.tolist() == expected


def test_forced_beginning_of_the_answer_is_prompt(paths):
    """Field case D12: the template's own, or an assistant message at the end."""
    tokenizer = load_tokenizer(paths["byte_level"])
    hf = hugging_face(paths["byte_level"])
    forced = tokenizer.encode_chat(CHAT)
    assert hf.decode(forced).endswith(f"{IM_START}assistant\n<think>\n")
    begun = tokenizer.encode_chat([*CHAT, {"role": "assistant", "content": "the mat"}])
    assert hf.decode(begun).endswith(f"{IM_START}assistant\nthe mat")
    response = Branch([5, 6, 1], rollout_logprobs=[-1.0, -2.0, -3.0])
    assert response.loss_mask.tolist() == [1.0, 1.0, 1.0]


def test_template_that_rewrites_earlier_turns_moves_no_mask(paths):
    """Field case I11: the prompt is no prefix of the templated whole, so the response is its sampled ids alone."""
    tokenizer = load_tokenizer(paths["byte_level"])
    answer = {"role": "assistant", "content": "<think>the mat</think>the cat"}
    prompt, sampled = tokenizer.encode_chat(CHAT), without_bos(tokenizer, answer["content"])
    whole = tokenizer.encode_chat([*CHAT, answer, CHAT[1]])
    assert whole[: len(prompt)].tolist() != prompt.tolist()
    branch = Branch(sampled)
    assert branch.response_ids.tolist() == sampled.tolist() and len(branch.loss_mask) == len(sampled)


def test_template_that_refuses_says_so_in_one_line(paths):
    tokenizer = load_tokenizer(paths["byte_level"])
    with pytest.raises(TokenizerError, match="no tools here") as error:
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])
    assert "\n" not in str(error.value)


def test_sentence_piece_has_no_chat(paths):
    with pytest.raises(TokenizerError, match="SentencePiece.*--tokenizer-model"):
        load_tokenizer(paths["sentence_piece"]).encode_chat(CHAT)


def test_sentence_piece_kinds_of_pieces(paths):
    tokenizer = load_tokenizer(paths["sentence_piece"])
    sp = sentencepiece.SentencePieceProcessor(model_file=str(paths["sentence_piece"]))

    def pieces(text):
        return [sp.id_to_piece(int(id)) for id in tokenizer.encode(text)]

    assert pieces("the cat") == ["<s>", "\u2581the", "\u2581cat"]  # dummy prefix
    assert pieces("é")[-2:] == ["<0xC3>", "<0xA9>"]  # byte fallback
    assert "<|user|>" in pieces("the <|user|>cat") and "ctl" not in pieces("the ctl cat")
    assert pieces("<s> the").count("<s>") == 1
    user, control = sp.piece_to_id("<|user|>"), sp.piece_to_id("ctl")
    the, cat = without_bos(tokenizer, "the cat")
    assert tokenizer.decode([1, the, control, user, cat, 2]) == " the<|user|> cat"


def test_response_keeps_its_leading_space(tokenizer):
    """Field case I02: what continues a prompt is text, not a sentence of its own."""
    prompt, both = tokenizer.encode("the cat"), tokenizer.encode("the cat readers of this test")
    assert both[: len(prompt)].tolist() == prompt.tolist()
    assert tokenizer.decode(both[len(prompt) :]) == " readers of this test"


def test_parts_decode_to_parts_of_the_text(tokenizer):
    ids = without_bos(tokenizer, "the cat  sat\non the mat , twice")
    whole = tokenizer.decode(ids)
    assert whole.strip() == "the cat  sat\non the mat , twice" or not tokenizer.has_chat_template
    for cut in range(len(ids) + 1):
        assert tokenizer.decode(ids[:cut]) + tokenizer.decode(ids[cut:]) == whole


def test_ids_stay_what_was_sampled(tokenizer):
    """Field case I03: text that encodes to other ids than it came from."""
    letters = {tokenizer.decode([id]): id for id in range(tokenizer.vocab_size)}
    ids = np.array([letters[letter] for letter in "the"])
    text = tokenizer.decode(ids)
    assert text == "the"
    assert without_bos(tokenizer, text).tolist() != ids.tolist()
    branch = Branch(ids, rollout_logprobs=-np.ones(len(ids)))
    assert branch.response_ids.tolist() == ids.tolist() and branch.num_tokens == len(branch.rollout_logprobs)


def test_broken_characters(tokenizer):
    """Field case I05: an emoji in bytes, whole, cut at every place, and as the end of a response."""
    ids = without_bos(tokenizer, "the 🐈")
    assert tokenizer.decode(ids).strip() == "the 🐈"
    num_bytes = len("🐈".encode())
    for cut in range(len(ids) - num_bytes + 1, len(ids)):
        text = tokenizer.decode(ids[:cut])
        assert text.strip().startswith("the \ufffd") and "🐈" not in text
        assert tokenizer.decode(ids[cut:]).startswith("\ufffd")


def test_any_ids_decode(tokenizer):
    """A model whose vocabulary is padded may sample ids that the tokenizer does not have."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, tokenizer.vocab_size, 30)
        assert tokenizer.decode(np.append(ids, tokenizer.vocab_size + 5)) == tokenizer.decode(ids)
    assert tokenizer.decode(np.zeros(0, dtype=np.int64)) == ""


def test_special_tokens_are_left_out_of_the_text(tokenizer):
    ids = without_bos(tokenizer, "the cat")
    assert tokenizer.decode([tokenizer.bos_token_id, *ids, *tokenizer.eos_token_ids]) == tokenizer.decode(ids)


def test_vocab_size_counts_holes(tmp_path):
    path = tiny_tokenizers.byte_level(tmp_path / "x")
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 999
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(path).vocab_size == 1000


def test_limits_saved_with_a_tokenizer_have_no_effect(tmp_path):
    path = tiny_tokenizers.byte_level(tmp_path / "x", model_max_length=4)
    expected = load_tokenizer(path).encode("the cat sat on the mat").tolist()
    saved = Tokenizer.from_file(str(path / "tokenizer.json"))
    saved.enable_truncation(3)
    saved.enable_padding(length=20)
    saved.save(str(path / "tokenizer.json"))
    assert load_tokenizer(path).encode("the cat sat on the mat").tolist() == expected
    assert load_tokenizer(path).encode_chat(CHAT)[-1] != 0


def test_eos_is_the_configured_one(tmp_path):
    assert load_tokenizer(tiny_tokenizers.byte_level(tmp_path / "a", eos_token=IM_END)).eos_token_ids == (3,)
    assert load_tokenizer(tiny_tokenizers.byte_level(tmp_path / "b", eos_token=None)).eos_token_ids == ()


def test_pad_that_is_eos_hides_nothing(tmp_path):
    """Field case D02: nothing is padded, so no id is taken for padding."""
    tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path / "x", pad_token=EOS))
    ids = tokenizer.encode(f"the{EOS}cat{EOS}")
    assert ids.tolist().count(1) == 2
    assert Branch([5, 6, 1]).loss_mask.tolist() == [1.0, 1.0, 1.0]


def refuse(path, *words):
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(path)
    for word in (str(path), "--tokenizer-model", *words):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, content, word",
    [
        ("tokenizer.json", b"not JSON", "JSON"),
        ("tokenizer.json", b"[]", "vocabulary"),
        ("tokenizer.json", b'{"model": {}}', "vocabulary"),
        ("tokenizer.json", b'{"model": {"type": "Nope", "vocab": {}}}', "BPE"),
        ("tokenizer.json", b'{"model"', "JSON"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "cannot be loaded"),
        ("tokenizer.model", b"not a model", "SentencePiece"),
        ("tokenizer.model", b"", "SentencePiece"),
        ("vocab.txt", b"a b", "Hugging Face folder"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    refuse(tmp_path / name, word)
    if name == "tokenizer.json":
        with pytest.raises(TokenizerError, match="tokenizer.json"):
            load_tokenizer(tmp_path)


def test_missing_and_empty_places(tmp_path):
    refuse(tmp_path / "nothing", "no such")
    refuse(tmp_path)


def test_code_of_a_model_never_runs(tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refuse(tmp_path)
    assert not (tmp_path / "ran").exists()
