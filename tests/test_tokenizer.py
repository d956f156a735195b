"""Ids and text: one BOS, every end id, the same text streamed and at once, and files that lie."""

import json
import random
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spmoe_lite import tokenizer as tokenizer_module
from spmoe_lite.config import ModelConfig, Rope
from spmoe_lite.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from spmoe_lite.tokenizer import Tokenizer
from tests.tiny import BOS, EOS, VOCAB, write_tokenizer

KINDS = ["byte-level", "byte-fallback", "metaspace"]
TEXTS = [
    "",
    "the cat",
    " a  b ",
    "\n\nx\t",
    "naïve 한국어 \U0001f600\U0001f469‍\U0001f680",
    "</s>x<s>",
    "a</s> b",
]


def make(folder, kind="byte-level"):
    """A tokenizer folder of 320 entries; "metaspace" has the decoder of newer SentencePiece files."""
    if kind != "metaspace":
        write_tokenizer(folder, kind)
        return folder
    write_tokenizer(folder, "byte-fallback")
    content = read(folder)
    content["normalizer"] = None
    content["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    content["decoder"] = content["pre_tokenizer"]
    return write(folder, content)


def read(folder, name="tokenizer.json"):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def write(folder, content, name="tokenizer.json"):
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def change(folder, name="tokenizer.json", **values):
    return write(folder, (read(folder, name) if (folder / name).exists() else {}) | values, name)


def config(vocab_size=VOCAB, eos=(EOS,), bos=BOS):
    return ModelConfig(
        "mixtral", vocab_size, 64, 96, 2, 4, 2, 16, 1e-5, 512, Rope(1e6),
        bos_token_id=bos, eos_token_ids=tuple(eos),
    )  # fmt: skip


def reference(folder):
    """The reference library on the same files, without its own ideas of a class's settings."""
    names = {k: v for k, v in read(folder, "tokenizer_config.json").items() if k.endswith("_token")}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(our tokenizer, the reference's) of each kind."""
    folder = make(tmp_path_factory.mktemp(request.param), request.param)
    return Tokenizer.load(folder), reference(folder)


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path)


# Detokenizing


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [stream.push(i) for i in ids] + [stream.finish()]


def assert_streams(tokenizer, reference, ids, special):
    whole = reference.decode(
        ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    assert "".join(streamed(tokenizer, ids, special=special)) == whole
    assert tokenizer.decode(ids, special=special) == whole


def test_kind_e_o11_a_stream_equals_one_shot_decoding_for_1000_random_id_lists(pair):
    choose = random.Random(11)
    for _ in range(1000):
        ids = [choose.randrange(VOCAB) for _ in range(choose.randrange(40))]
        assert_streams(*pair, ids, special=choose.random() < 0.5)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=30), cut=st.integers(0, 200), noise=st.lists(st.integers(0, VOCAB - 1))
)
def test_kind_e_o11_a_stream_equals_one_shot_decoding_of_cut_texts(pair, text, cut, noise):
    ids = pair[0].encode(text)[: cut + 1]
    assert_streams(*pair, ids + noise, special=False)
    assert_streams(*pair, noise + ids, special=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_kind_e_o11_only_whole_characters_are_emitted(pair, text):
    ids = pair[0].encode(text, bos=False)
    pieces = streamed(pair[0], ids, special=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert all(piece.encode("utf-8") is not None for piece in pieces)  # no half of a surrogate pair


@pytest.mark.parametrize(
    "kind, text",
    [("byte-level", "\U0001f600"), ("byte-level", "한"), ("byte-fallback", "\U0001f600")],
)
def test_kind_e_o11_an_emoji_over_several_byte_tokens_appears_once_and_whole(tmp_path, kind, text):
    tokenizer = Tokenizer.load(make(tmp_path, kind))
    ids = tokenizer.encode(text, bos=False)
    assert len(ids) >= len(text.encode("utf-8"))
    assert [piece for piece in streamed(tokenizer, ids) if piece] == [text]


def test_kind_e_o11_byte_level_text_is_not_held_back_longer_than_a_character(tmp_path):
    tokenizer = Tokenizer.load(make(tmp_path))
    stream = tokenizer.stream()
    for character in "a é \U0001f600 한 b":
        shown = "".join(stream.push(i) for i in tokenizer.encode(character, bos=False))
        assert shown == character


def test_kind_e_o11_a_run_with_one_bad_byte_is_replaced_byte_by_byte(tmp_path):
    tokenizer = Tokenizer.load(make(tmp_path, "byte-fallback"))
    byte = {piece: i for i, piece in enumerate(tokenizer.pieces())}
    ids = [byte[f"<0x{b:02X}>"] for b in "é".encode() + b"\xff"] + tokenizer.encode("a", bos=False)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "\ufffd\ufffd\ufffd a"


def test_kind_e_o11_the_first_space_goes_and_the_others_stay(pair):
    tokenizer, _ = pair
    text = "a b  c"
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


def test_kind_e_o11_a_continuation_keeps_its_space(tmp_path):
    tokenizer = Tokenizer.load(make(tmp_path, "byte-fallback"))
    prompt, answer = tokenizer.encode("the cat"), tokenizer.encode("was here", bos=False)
    assert "".join(streamed(tokenizer, answer, after=prompt)) == " was here"
    assert "".join(streamed(tokenizer, answer)) == "was here"
    assert "".join(streamed(tokenizer, answer, after=[BOS])) == "was here"


def test_a_token_costs_no_second_look_at_those_before(pair, monkeypatch):
    tokenizer, _ = pair
    ids = tokenizer.encode("the quick brown fox 한국어 \U0001f600") * 50
    whole = tokenizer.decode(ids)
    monkeypatch.setattr(tokenizer, "_inner", None)  # any call of the library would fail
    stream = tokenizer.stream()
    shown = ""
    for i in ids:
        shown += stream.push(i)
        assert len(stream._run) < 64
    assert shown + stream.finish() == whole


def test_spaces_that_the_model_wrote_are_kept(folder):
    change(folder, "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("well , it 's over .", bos=False)
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == "well , it 's over ."


def test_pieces_without_a_decoder_are_joined_by_spaces(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("b a a")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "b a a"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Strip(" ", 0, 1),
        decoders.Replace(tokenizers.Regex("a+"), "b"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(folder, decoder):
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.decoder = decoder
    inner.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="tokenizer.json decodes with '"):
        Tokenizer.load(folder)


def test_kind_e_o12_special_tokens_and_end_ids_are_shown_only_when_asked(folder):
    change(folder, "tokenizer_config.json", pad_token="zz")
    write(folder, {"eos_token_id": [2, 65]}, "generation_config.json")
    tokenizer = Tokenizer.load(folder)
    ids = [BOS, *tokenizer.encode("hi", bos=False), 65, EOS]
    ended_by_text = tokenizer.pieces()[65]
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == "hi"
    shown = f"<s>hi{ended_by_text}</s>"
    assert tokenizer.decode(ids, special=True) == shown
    assert "".join(streamed(tokenizer, ids, special=True)) == shown


def test_ids_without_text_are_left_out(folder):
    tokenizer = Tokenizer.load(folder)
    ids = [*tokenizer.encode("hi", bos=False), VOCAB, 10**9, -1]
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == "hi"


# Encoding


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.text(max_size=30), st.sampled_from(TEXTS)))
def test_ids_equal_those_of_the_reference(pair, text):
    tokenizer, reference = pair
    assert tokenizer.encode(text, bos=False) == reference.encode(text, add_special_tokens=False)
    if not text.startswith("<s>"):
        assert tokenizer.encode(text) == reference.encode(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "flags", [{"normalized": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}, {}]
)
def test_added_tokens_with_flags_are_found_as_by_the_reference(tmp_path, kind, flags):
    make(tmp_path, kind)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_tokens([tokenizers.AddedToken("a tool", **({"normalized": False} | flags))])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer, other = Tokenizer.load(tmp_path), reference(tmp_path)
    assert tokenizer.num_tokens == VOCAB + 1 and tokenizer.pieces()[VOCAB] == "a tool"
    for text in ("a tool", "x a tool y", "xa tooly", " a tool ", "a tool a tool", "the a tool."):
        ids = tokenizer.encode(text)
        assert ids == other.encode(text)
        assert_streams(tokenizer, other, ids, special=True)


def test_kind_d_o9_raw_text_gets_exactly_one_bos(pair):
    tokenizer, _ = pair
    for text in TEXTS + ["<s>", "<s><s>the"]:
        ids = tokenizer.encode(text)
        assert ids[0] == BOS and ids[1:2] != [BOS]
    assert tokenizer.encode("<s>the") == tokenizer.encode(
        "the" if pair[0]._rules.byte_level else "<s>the"
    )
    assert BOS not in tokenizer.encode("the", bos=False)


def test_kind_d_o9_a_tokenizer_without_bos_adds_none(folder):
    change(folder, post_processor=None)
    change(folder, "tokenizer_config.json", bos_token=None, add_bos_token=None)
    tokenizer = Tokenizer.load(folder, config(bos=None))
    assert tokenizer.bos_id is None and not tokenizer.adds_bos
    assert tokenizer.encode("the") == tokenizer.encode("the", bos=False)


@pytest.mark.parametrize(
    "post_processor, settings, adds",
    [
        (True, {"add_bos_token": None}, True),  # the file's own post-processor
        (True, {"add_bos_token": False}, False),  # the setting wins
        (False, {"add_bos_token": True}, True),
        (False, {"add_bos_token": None}, False),  # SmolLM2: a BOS that only its template prints
        (False, {"add_bos_token": None, "tokenizer_class": "LlamaTokenizerFast"}, True),
    ],
)
def test_kind_d_o9_who_says_that_text_starts_with_a_bos(folder, post_processor, settings, adds):
    if not post_processor:
        change(folder, post_processor=None)
    change(folder, "tokenizer_config.json", **settings)
    tokenizer = Tokenizer.load(folder, config())
    assert tokenizer.bos_id == BOS and tokenizer.adds_bos is adds
    assert tokenizer.encode("the").count(BOS) == adds
    assert tokenizer.encode("<s>the").count(BOS) == 1


def test_kind_d_o9_a_bos_is_known_without_tokenizer_config(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id == BOS and tokenizer.encode("the").count(BOS) == 1
    assert tokenizer.special_tokens["bos_token"] == "<s>"


def test_an_end_token_that_the_post_processor_appends_is_not_part_of_a_prompt(folder):
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    inner.save(str(folder / "tokenizer.json"))
    ids = Tokenizer.load(folder).encode("the")
    assert ids[0] == BOS and EOS not in ids


def test_truncation_padding_and_dropout_left_in_a_file_do_not_touch_a_prompt(folder):
    text = "the quick brown fox " * 20
    clean = Tokenizer.load(folder).encode(text)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(8)
    inner.enable_padding(length=500)
    inner.model.dropout = 0.5
    inner.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode(text) == clean


def test_half_a_surrogate_pair_is_a_usage_error(folder):
    with pytest.raises(UsageError, match="lone surrogate at character 2"):
        Tokenizer.load(folder).encode("ab\ud83d")


# End ids and rows


@pytest.mark.parametrize(
    "generation, from_config, eos",
    [
        ({"eos_token_id": [2, 7]}, (7,), (2, 7)),
        ({"eos_token_id": 7}, (), (2, 7)),
        ({"eos_token_id": None}, (9, 7), (2, 7, 9)),
        (None, (7,), (2, 7)),
        (None, (), (2,)),
        ({"eos_token_id": [2, 10**6, True, "7"]}, (2,), (2,)),
    ],
)
def test_kind_e_o13_the_end_ids_of_all_places_are_one_set(folder, generation, from_config, eos):
    if generation is not None:
        write(folder, generation, "generation_config.json")
    assert Tokenizer.load(folder, config(eos=from_config)).eos_ids == eos


def test_kind_e_o13_an_end_token_written_as_an_object_counts(folder):
    change(folder, "tokenizer_config.json", eos_token={"content": "</s>", "lstrip": False})
    assert Tokenizer.load(folder).eos_ids == (EOS,)
    change(folder, "tokenizer_config.json", eos_token=None)
    write(folder, {"eos_token": {"content": "</s>"}}, "special_tokens_map.json")
    assert Tokenizer.load(folder).eos_ids == (EOS,)


def test_kind_d_o7_more_rows_than_tokens_are_fine_and_the_count_is_that_of_the_tokens(folder):
    tokenizer = Tokenizer.load(folder, config(vocab_size=VOCAB + 20))
    assert tokenizer.num_tokens == VOCAB and tokenizer.missing_ids == ()


def test_kind_d_o7_a_token_beyond_the_rows_is_refused(folder):
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens(["zzz1", "zzz2"])
    inner.save(str(folder / "tokenizer.json"))
    with pytest.raises(
        UnsupportedError, match="'zzz1' with id 320, but the model has 320 embedding rows"
    ):
        Tokenizer.load(folder, config())
    assert Tokenizer.load(folder, config(VOCAB + 2)).num_tokens == VOCAB + 2


def test_kind_d_o7_tokens_that_only_the_settings_list_are_counted(folder):
    listed = {
        "320": {"content": "zzz1", "special": True},
        "321": {"content": "zzz2"},
        "1": {"content": "<s>"},
    }
    change(folder, "tokenizer_config.json", added_tokens_decoder=listed)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.num_tokens == 322 and tokenizer.pieces()[320:] == ["zzz1", "zzz2"]
    assert tokenizer.encode("zzz2zzz1", bos=False) == [321, 320]
    assert tokenizer.decode([321, 320]) == "zzz2"
    with pytest.raises(UnsupportedError, match="320 embedding rows"):
        Tokenizer.load(folder, config())
    change(folder, "tokenizer_config.json", added_tokens_decoder={"330": {"content": "zzz1"}})
    with pytest.raises(DamagedError, match="'zzz1' with id 330"):
        Tokenizer.load(folder)


def test_kind_d_o7_an_id_that_no_entry_uses_is_reported(folder):
    content = read(folder)
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    content["model"]["merges"] = [m for m in content["model"]["merges"] if "".join(m) != last]
    vocab[last] = VOCAB + 1
    content["model"]["merges"] = []
    write(folder, content)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.num_tokens == VOCAB + 2
    assert tokenizer.missing_ids == (VOCAB - 1, VOCAB) and tokenizer.pieces()[VOCAB] == ""


def test_pieces_are_those_of_the_library(pair):
    tokenizer, reference = pair
    assert tokenizer.pieces() == reference.convert_ids_to_tokens(list(range(VOCAB)))


# Draft and target


@pytest.fixture
def target(folder):
    return Tokenizer.load(folder)


def draft_of(folder, swap=(), more=0, insert=0):
    """The same vocabulary with ids swapped, entries added at the end or inserted at id 3."""
    content = read(folder)
    ids = content["model"]["vocab"]
    by_id = sorted(ids, key=ids.get)
    for a, b in swap:
        by_id[a], by_id[b] = by_id[b], by_id[a]
    by_id[3:3] = [f"[control_{i}]" for i in range(insert)]
    by_id += [f"[more_{i}]" for i in range(more)]
    content["model"]["vocab"] = {piece: i for i, piece in enumerate(by_id)}
    for token in content["added_tokens"]:
        token["id"] = by_id.index(token["content"])
    content["post_processor"] = None
    (folder / "draft").mkdir()
    write(folder / "draft", content)
    (folder / "draft" / "tokenizer_config.json").write_bytes(
        (folder / "tokenizer_config.json").read_bytes()
    )
    return Tokenizer.load(folder / "draft")


def test_kind_d_o15_the_same_vocabulary_passes(target, folder):
    target.check_draft(draft_of(folder), VOCAB, VOCAB)
    target.check_draft(
        draft_of(make(folder / "b")), VOCAB + 64, VOCAB + 16
    )  # rows that no token uses


def test_kind_d_o15_a_two_swapped_ids_are_refused(target, folder):
    pieces = target.pieces()
    with pytest.raises(UnsupportedError, match="id 100 is ") as error:
        target.check_draft(draft_of(folder, swap=[(100, 200)]), VOCAB, VOCAB)
    assert repr(pieces[100]) in str(error.value) and repr(pieces[200]) in str(error.value)


def test_kind_d_o15_b_entries_at_the_end_of_the_draft_pass(target, folder):
    target.check_draft(draft_of(folder, more=16), VOCAB, VOCAB + 16)


def test_kind_d_o15_b_entries_that_only_the_target_has_are_refused(target, folder):
    draft = draft_of(folder, more=16)
    with pytest.raises(UnsupportedError, match="id 320 is .*more_0.* nothing in the draft"):
        draft.check_draft(target, VOCAB + 16, VOCAB + 16)


def test_kind_d_o15_c_ids_inserted_at_the_start_are_refused(target, folder):
    with pytest.raises(UnsupportedError, match=r"id 3 is .* and '\[control_0\]' in the draft"):
        target.check_draft(draft_of(folder, insert=8), VOCAB, VOCAB + 8)


def test_kind_d_o15_d_another_bos_or_end_id_is_refused(target, folder):
    change(folder, "tokenizer_config.json", bos_token="</s>", add_bos_token=False)
    with pytest.raises(UnsupportedError, match="BOS is id 2 and the target's id 1"):
        target.check_draft(Tokenizer.load(folder), VOCAB, VOCAB)
    change(folder, "tokenizer_config.json", bos_token="<s>", eos_token="<unk>")
    with pytest.raises(UnsupportedError, match="ends at id 0 and the target at id 2"):
        target.check_draft(Tokenizer.load(folder), VOCAB, VOCAB)


def test_kind_d_o15_tokens_beyond_the_rows_of_either_model_are_refused(target, folder):
    for rows in ((VOCAB - 1, VOCAB), (VOCAB, VOCAB - 1)):
        with pytest.raises(UnsupportedError, match="319 embedding rows"):
            target.check_draft(draft_of(make(folder / str(rows[0]))), *rows)


def test_kind_d_o15_150000_entries_are_compared_in_less_than_100_ms(tmp_path):
    vocab = {f"piece{i}": i for i in range(150_000)}
    pair = []
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        inner.decoder = decoders.ByteLevel()
        inner.save(str(tmp_path / name / "tokenizer.json"))
        pair.append(Tokenizer.load(tmp_path / name))
    times = []
    for _ in range(5):
        start = time.process_time()
        pair[0].check_draft(pair[1], 150_000, 150_000)
        times.append(time.process_time() - start)
    assert min(times) < 0.1


# Files that are missing, broken or hostile


def test_a_folder_without_any_tokenizer(tmp_path):
    with pytest.raises(NotFoundError, match="no tokenizer.json in"):
        Tokenizer.load(tmp_path)
    with pytest.raises(NotFoundError, match="no folder"):
        Tokenizer.load(tmp_path / "none")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_folder_with_a_slow_tokenizer_only_is_refused_with_the_remedy(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        UnsupportedError, match=f"has {name} but no tokenizer.json; make one with .*save_pretrained"
    ):
        Tokenizer.load(tmp_path)


def assert_damaged(folder, name="tokenizer.json"):
    with pytest.raises(DamagedError) as error:
        tokenizer = Tokenizer.load(folder)
        tokenizer.encode("a" * 300 + "b")
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"model": 3}',
        '{"model": {}}',
        "\x00" * 10,
        "[" * 100_000,
        '{"a":' * 5000,
    ],
)
def test_a_file_that_is_no_tokenizer_is_damaged(folder, content):
    assert_damaged(write(folder, content))


def test_a_truncated_file_is_damaged(folder):
    data = (folder / "tokenizer.json").read_bytes()
    for length in range(0, len(data), 997):
        (folder / "tokenizer.json").write_bytes(data[:length])
        assert_damaged(folder)


def test_bytes_that_are_no_text_are_damaged(folder):
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe" + (folder / "tokenizer.json").read_bytes())
    assert_damaged(folder)


def test_a_huge_file_is_refused_before_it_is_read(folder):
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(tokenizer_module.MAX_FILE_BYTES + 1)  # sparse
    assert_damaged(folder)


@pytest.mark.parametrize("highest", [2**22, 2**32 - 1, 2**63])
def test_an_absurd_id_allocates_nothing(folder, highest):
    content = read(folder)
    content["model"]["merges"] = []
    content["model"]["vocab"]["zzz"] = highest
    assert_damaged(write(folder, content))


def test_one_id_for_two_pieces_is_damaged(folder):
    content = read(folder)
    content["model"]["vocab"]["zzz"] = 100
    assert_damaged(write(folder, content))


def test_an_added_token_with_an_impossible_id_is_damaged(folder):
    content = read(folder)
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 400, "content": "zzz"})
    assert_damaged(write(folder, content))


def test_what_the_library_would_panic_on_is_refused_before(folder, capfd):
    content = read(folder)
    content["post_processor"]["special_tokens"] = {}
    assert_damaged(write(folder, content))
    write_tokenizer(folder)
    content = read(folder)
    content["model"]["continuing_subword_prefix"] = "##########"
    with pytest.raises(UnsupportedError, match="tokenizer.json"):
        Tokenizer.load(write(folder, content))
    assert capfd.readouterr().err == ""  # a panic would have written there


def test_a_panic_of_the_library_names_the_file(folder):
    content = read(folder)
    content["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    assert_damaged(write(folder, content))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_taken_for_a_panic(folder, interrupt):
    def stop():
        raise interrupt

    with pytest.raises(interrupt):
        tokenizer_module._guard(stop, folder / "tokenizer.json")


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
def test_a_broken_neighbour_is_damaged_by_its_own_name(folder, name):
    assert_damaged(write(folder, "{", name), name)
    assert_damaged(write(folder, "[]", name), name)


def test_fuzzed_files_are_refused_or_work(folder):
    """Sections deleted, swapped and replaced: a typed error, or a tokenizer whose stream is right."""
    original = read(folder)
    junk = [None, -1, 2**40, "", "▁", [], {}, True, {"String": "a"}, "Sequence", 1.5]
    for seed in range(300):
        choose = random.Random(seed)
        content = json.loads(json.dumps(original))
        holder = content
        for _ in range(choose.randrange(4)):
            inside = [k for k, v in holder.items() if isinstance(v, dict) and k != "vocab"]
            if not inside:
                break
            holder = holder[choose.choice(inside)]
        key = choose.choice(list(holder) or ["x"])
        holder[key] = choose.choice(junk)
        write(folder, content)
        try:
            tokenizer = Tokenizer.load(folder)
        except (DamagedError, UnsupportedError) as error:
            assert "\n" not in str(error)
            continue
        ids = [choose.randrange(VOCAB) for _ in range(20)]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
