"""Chat templates: the reference's ids, histories they refuse, and templates that attack."""

import json
import threading
import tracemalloc
from datetime import datetime

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from spmoe_lite import sandbox
from spmoe_lite.chat_template import ChatTemplate
from spmoe_lite.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from spmoe_lite.tokenizer import Tokenizer
from tests.tiny import BOS, write_tokenizer

# Templates in the manner of published families; the wording is ours.
STRICT = (  # Mistral 7B Instruct 0.1, Mixtral: alternation, no system role
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe useful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
HEADERS = """{{- bos_token }}
{%- set ns = namespace(last=-1, n=0) %}
{%- macro head(role) %}{{ '<|' ~ role ~ '|>\\n\\n' }}{% endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{% set system_message = '' %}{% endif %}
{{- head('system') }}{{ 'Today: ' + strftime_now('%Y') + '\\n' if date is not defined else date }}
{{- system_message + '<|eot|>' }}
{%- for message in messages | selectattr('role', 'in', ['user', 'assistant', 'tool']) %}
    {%- if message.role == 'tool' or message.tool_calls is defined %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}{{ head('call') + call.function | tojson(indent=2) }}{% endfor %}
        {%- else %}{{ head('result') ~ message.content | tojson }}{% endif %}
    {%- else %}
        {%- set ns.n = ns.n + 1 %}
        {%- if ns.n > 50 %}{% break %}{% endif %}
        {{- head(message.role) + message.content.strip().split('</think>')[-1].lstrip('\\n') + '<|eot|>' }}
    {%- endif %}
{%- else %}{{ 'nothing' }}{% endfor %}
{%- generation %}{{ head('assistant') if add_generation_prompt }}{%- endgeneration %}"""
NINE = (  # Mistral v0.3 and later: tool-call ids of nine letters or digits
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined and m.tool_calls %}{% for call in m.tool_calls %}"
    "{% if call.id|length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}[TOOL_CALLS]{{ call.id }}{{ call.function|tojson }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}:{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def called(call_id, **more):
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "w", "arguments": {"n": [1, None]}},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def result(call_id):
    return {"role": "tool", "content": "3 é", "tool_call_id": call_id}


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def reference_ids(reference, source, messages):
    return reference.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=True, return_dict=False
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


# The reference's ids


HISTORIES = [
    [user("Hello")],
    [user("a  \n"), assistant("<think>hm</think>\n\nHi"), user("한국 \U0001f600")],
    [system(" Be brief.\n"), user("a"), assistant("b"), user("c")],
    [user("a"), called("abcdefgh1"), result("abcdefgh1"), assistant("so"), user("c")],
]


@pytest.mark.parametrize(
    "source, histories",
    [(STRICT, [0, 1]), (CHATML, [0, 1, 2]), (HEADERS, [0, 1, 2, 3]), (NINE, [0, 1, 3])],
)
def test_ids_equal_those_of_the_reference(tokenizer, reference, source, histories):
    for i in histories:
        expected = reference_ids(reference, source, HISTORIES[i])
        ids = ChatTemplate(source, tokenizer).encode(HISTORIES[i])
        assert ids == ([] if expected[0] == BOS else [BOS]) + expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_ids_equal_those_of_the_reference_for_any_text(tokenizer, reference, texts):
    messages = [user(text) if i % 2 == 0 else assistant(text) for i, text in enumerate(texts)]
    for source in (STRICT, HEADERS):
        assert ChatTemplate(source, tokenizer).encode(messages) == reference_ids(
            reference, source, messages
        )


def test_the_template_sees_what_the_reference_gives_it(tokenizer):
    source = (
        "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ unk_token }} "
        "{{ pad_token is defined }} {{ strftime_now('%Y') }} {{ {'b': '<é>', 'a': 1} | tojson }} "
        "{{ 1 | tojson }} {{ [1, 2] | tojson(indent=1) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"
    )
    text = ChatTemplate(source, tokenizer).render([user("x")])
    expected = (
        f'True True True <unk> False {datetime.now():%Y} {{"b": "<é>", "a": 1}} 1 [\n 1,\n 2\n] '
    )
    assert text == expected + '{"a": 2, "b": 1}'


def test_loop_controls_and_the_generation_tag_work(tokenizer):
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    )
    assert ChatTemplate(source, tokenizer).render([user("x")]) == "023x"


@pytest.mark.parametrize("template_prints", [True, False])
@pytest.mark.parametrize("tokenizer_adds", [True, False])
def test_kind_d_o9_exactly_one_bos_in_all_cases(folder, tmp_path, template_prints, tokenizer_adds):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    values = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": tokenizer_adds}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    source = STRICT if template_prints else STRICT.replace("{{ bos_token }}", "")
    ids = ChatTemplate(source, tokenizer).encode([user("the"), assistant("a"), user("fox")])
    assert ids.count(BOS) == (template_prints or tokenizer_adds)
    assert (ids[0] == BOS) == (template_prints or tokenizer_adds)


def test_kind_d_o9_a_model_without_bos_gets_none(folder, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    content = json.loads(inner.to_str()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    for source in (STRICT, CHATML):
        ids = ChatTemplate(source, Tokenizer.load(tmp_path)).encode([user("the")])
        assert BOS not in ids
        other = PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="</s>"
        )
        assert ids == reference_ids(other, source, [user("the")])


def test_a_longer_history_begins_with_the_shorter_one(tokenizer):
    """What lets a turn reuse the cache of the turn before; the engine compares ids itself."""
    first = [system("Be brief."), user("the fox"), assistant("and the dog"), user("and then")]
    for source in (STRICT, CHATML, HEADERS):
        template = ChatTemplate(source, tokenizer)
        short = template.encode(first)
        long = template.encode([*first, assistant("it was"), user("so")])
        same = next(
            i
            for i, (a, b) in enumerate(zip(short, long, strict=False))
            if a != b or i + 1 == len(short)
        )
        assert same >= len(short) - 2


# Histories that a template refuses


def strict(tokenizer):
    return ChatTemplate(STRICT, tokenizer)


def test_kind_d_o10_system_text_is_folded_into_the_first_user_turn(tokenizer, reference):
    messages = [system("Be brief."), user("Hello"), assistant("Hi"), user("Why?")]
    folded = [user("Be brief.\n\nHello"), assistant("Hi"), user("Why?")]
    assert strict(tokenizer).encode(messages) == reference_ids(reference, STRICT, folded)


@pytest.mark.parametrize(
    "messages, text",
    [
        ([user("a"), user("b")], "<s>[INST] a\n\nb [/INST]"),
        (
            [user("a"), assistant("b"), assistant("c"), user("d")],
            "<s>[INST] a [/INST]b\n\nc</s> [INST] d [/INST]",
        ),
        ([system("s"), system("t"), user("a"), user("b")], "<s>[INST] s\n\nt\n\na\n\nb [/INST]"),
        (
            [user("a"), assistant("b"), system("s"), user("c")],
            "<s>[INST] a [/INST]b</s> [INST] s\n\nc [/INST]",
        ),
        ([user("a"), system("s")], "<s>[INST] a\n\ns [/INST]"),
        ([system(""), user("a")], "<s>[INST] a [/INST]"),
        ([{"role": "developer", "content": "s"}, user("a")], "<s>[INST] s\n\na [/INST]"),
    ],
)
def test_kind_d_o10_what_a_strict_template_gets(tokenizer, messages, text):
    before = json.dumps(messages)
    assert strict(tokenizer).render(messages) == text
    assert json.dumps(messages) == before


def test_kind_d_o10_a_lenient_template_gets_the_history_as_it_is(tokenizer):
    messages = [assistant("Welcome"), user("a"), user("b"), system("s"), user("c")]
    text = ChatTemplate(CHATML, tokenizer).render(messages)
    assert text.count("<|im_start|>user\n") == 3 and "<|im_start|>system\ns<|im_end|>" in text


def test_kind_d_o10_a_system_message_that_a_template_would_drop_is_folded(tokenizer):
    source = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    template = ChatTemplate(source, tokenizer)
    assert template.render([system("s"), user("a")]) == "[user]s\n\na"
    first_only = source.replace("m.role != 'system'", "m.role != 'system' or loop.first")
    text = ChatTemplate(first_only, tokenizer).render(
        [system("s"), user("a"), system("t"), user("b")]
    )
    assert text == "[user]s\n\na[user]t\n\nb"


@pytest.mark.parametrize(
    "messages, match",
    [
        ([], "no user message"),
        ([system("s")], "no user message"),
        ([assistant("a")], "starts with an assistant message"),
        ([system("s"), assistant("a"), user("b")], "starts with an assistant message"),
        (
            [user("a"), {"role": "critic", "content": "b"}],
            "refuses these messages: only user",
        ),
        ("Hello", "must be a list"),
        (user("a"), "must be a list"),
        (["a"], "message 0 must be like"),
        ([{"content": "a"}], "message 0 must be like"),
        ([user(None)], "message 0 .user. must have text"),
        ([user("a"), user([{"type": "text", "text": "b"}])], "message 1 .user. must have text"),
        ([user("a") | {"x": object()}], "message 0 holds a object"),
        ([system("s"), user("ab\ud83d")], "message 1 is not .* surrogate at character 2;"),
    ],
)
def test_kind_d_o10_other_histories_are_usage_errors_in_one_line(tokenizer, messages, match):
    template = strict(tokenizer)
    with pytest.raises(UsageError, match=match) as error:
        template.encode(messages)
    assert "\n" not in str(error.value)
    assert template.encode([user("a")])  # the template stays usable


def test_kind_d_o14_long_tool_call_ids_become_nine_letters_and_stay_equal(tokenizer):
    long, other = "chatcmpl-tool-0123456789abcdef", "call_2"
    messages = [user("a"), called(long), result(long), called(other), result(other), user("b")]
    text = ChatTemplate(NINE, tokenizer).render(messages)
    ids = [part[:9] for part in text.split("[TOOL_CALLS]")[1:]]
    assert all(i.isascii() and i.isalnum() for i in ids) and len(set(ids)) == 2
    assert [part[:9] for part in text.split("[TOOL_RESULTS]")[1:]] == ids
    assert ChatTemplate(NINE, tokenizer).render(messages) == text  # the same in every turn


def test_kind_d_o14_ids_that_fit_and_templates_that_do_not_care_are_left_alone(tokenizer):
    messages = [user("a"), called("abcdefgh1"), result("abcdefgh1"), user("b")]
    assert "[TOOL_CALLS]abcdefgh1" in ChatTemplate(NINE, tokenizer).render(messages)
    free = "{% for m in messages %}{{ m.role }}{{ m.tool_call_id }}{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}"
    long = "call_0123456789"
    text = ChatTemplate(free, tokenizer).render([user("a"), called(long), result(long), user("b")])
    assert text.count(long) == 2


def test_kind_d_o14_a_model_without_tool_support_says_so(tokenizer):
    messages = [user("a"), called("abcdefgh1"), result("abcdefgh1"), user("b")]
    with pytest.raises(UsageError, match="no tool support"):
        strict(tokenizer).encode(messages)
    source = STRICT + "{# tool #}"
    with pytest.raises(UsageError, match="refuses these tool messages: (roles|only)"):
        ChatTemplate(source, tokenizer).encode(messages)


# Where a template comes from


@pytest.fixture
def own(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def set_template(folder, value):
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": value}
    path.write_text(json.dumps(content), encoding="utf-8")


def loaded(folder, **options):
    template = ChatTemplate.load(folder, Tokenizer.load(folder), **options)
    return template and template.render([user("x")])


@pytest.mark.parametrize(
    "value, text",
    [
        ("A", "A"),
        (None, None),
        ("", None),
        ([], None),
        ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": "rag", "template": "R"}], "R"),
        ({"default": "D", "rag": "R"}, "D"),
    ],
)
def test_the_template_of_tokenizer_config(own, value, text):
    set_template(own, value)
    assert loaded(own) == text


def test_the_file_wins_over_tokenizer_config_and_the_users_file_over_both(own, tmp_path):
    set_template(own, "A")
    (own / "chat_template.jinja").write_text("B\n", encoding="utf-8")
    assert loaded(own) == "B"
    (tmp_path / "mine.jinja").write_text("C {{ messages[0].content }}", encoding="utf-8")
    assert loaded(own, override=tmp_path / "mine.jinja") == "C x"


def test_no_settings_no_template(own):
    (own / "tokenizer_config.json").unlink()
    assert loaded(own) is None


@pytest.mark.parametrize(
    "value, error, match",
    [
        (
            [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}],
            UnsupportedError,
            "templates a, b but none",
        ),
        (3, DamagedError, "neither text nor a list"),
        ([{"name": "default", "template": 3}], DamagedError, "neither text nor a list"),
        (
            "{% if %}",
            DamagedError,
            r"tokenizer_config.json \(chat_template\) is not a valid template: line 1",
        ),
        ("\n{{ 'a", DamagedError, "line 2"),
        ("{{ x|nofilter }}", DamagedError, "nofilter"),
        ("{{ undefined.attribute }}", DamagedError, "cannot be rendered even for one user message"),
        ("{{ raise_exception('never\nmind') }}", DamagedError, "never mind"),
    ],
)
def test_a_bad_template_is_named_in_one_line_with_the_remedy(own, value, error, match):
    set_template(own, value)
    with pytest.raises(error, match=match) as raised:
        loaded(own)
    assert "\n" not in str(raised.value)


def test_bad_files(own):
    with pytest.raises(NotFoundError, match="cannot read the chat template"):
        loaded(own, override=own / "none.jinja")
    (own / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedError, match="not UTF-8"):
        loaded(own)
    (own / "chat_template.jinja").write_bytes(b" " * (1 << 21))
    with pytest.raises(DamagedError, match="too many for a chat template"):
        loaded(own)


# Attacks. All are refused in the time of a small budget; the real one is some seconds.

LARGE = "{% set s = 'a' * 1000000 %}"


def twice(start, step, end="{{ ns.x }}"):
    """A value that starts small and is changed 99 times."""
    body = "{% for i in range(99) %}{% set ns.x = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(x=" + start + ") %}" + body + end


def often(body):
    """Something done 99,999 times with a text of a million characters."""
    return LARGE + "{% set t = s ~ 'b' %}{% for i in range(99999) %}" + body + "{% endfor %}"


ATTACKS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "range": "{{ range(10 ** 10) | list }}",
    "repeated text": "{{ 'x' * 10 ** 10 }}",
    "repeated list": "{% set l = [0] * 10 ** 10 %}",
    "power": "{{ 2 ** (10 ** 10) }}",
    "squares": twice("3", "ns.x * ns.x"),
    "doubled by +": twice("'ab'", "ns.x + ns.x"),
    "doubled by ~": twice("'ab'", "ns.x ~ ns.x"),
    "doubled by %": twice("'ab'", "'%s%s' % (ns.x, ns.x)"),
    "doubled by format": twice("'ab'", "'{0}{0}'.format(ns.x)"),
    "doubled by format_map": twice("'ab'", "'{a}{a}'.format_map({'a': ns.x})"),
    "doubled by join": twice("'ab'", "[ns.x, ns.x] | join"),
    "doubled by str.join": twice("'ab'", "ns.x.join(['', '', ''])"),
    "doubled by replace": twice("'aa'", "ns.x | replace('a', 'aa')"),
    "doubled by str.replace": twice("'aa'", "ns.x.replace('', 'a')"),
    "doubled by a block set": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set y %}{{ ns.x }}"
    "{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubled list": twice("[1]", "ns.x + ns.x"),
    "lists of lists": twice("[1]", "[ns.x, ns.x]"),
    "tuples of tuples as a key": twice("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "objects of objects": twice("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    "objects by dict": twice("{}", "dict(a=ns.x, b=ns.x)", "{{ ns.x | string }}"),
    "lists compared": twice("[1]", "[ns.x, ns.x]", "{{ ns.x == [ns.x, 1] }}"),
    "namespaces of namespaces": twice("1", "namespace(a=ns.x, b=ns.x)"),
    "namespace in itself": "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns.x }}",
    "nesting": twice("1", "[ns.x]"),
    "width of %": "{{ '%9999999999d' % 3 }}",
    "precision of %": "{{ '%.9999999999f' % 3.1 }}",
    "width from a value": "{{ '%*d' % (9999999999, 3) }}",
    "width of the filter": "{{ '%9999999999d' | format(3) }}",
    "width of format": "{{ '{:>9999999999}'.format('x') }}",
    "nested width of format": "{{ '{:>{}}'.format('x', 9999999999) }}",
    "width of format_map": "{{ '{x:9999999999}'.format_map({'x': 1}) }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "str.center": "{{ 'x'.center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "filter block": "{% filter center(10 ** 10) %}x{% endfilter %}",
    "indent": "{{ 'x\ny' | indent(10 ** 10) }}",
    "indent by text": LARGE + "{{ ('x\n' * 100000) | indent(width=s) }}",
    "tojson indent": "{{ [1] | tojson(indent=10 ** 10) }}",
    "tojson separators": LARGE + "{{ ([1] * 9999) | tojson(separators=(s, s)) }}",
    "round": "{{ 2.5 | round(10 ** 10, 'ceil') }}",
    "replace": LARGE + "{{ s | replace('a', s) }}",
    "str.replace": LARGE + "{{ s.replace('a', s) }}",
    "join": LARGE + "{{ range(99999) | join(s) }}",
    "str.join": LARGE + "{{ s.join([''] * 99999) }}",
    "format with one large value": LARGE + "{{ ('{0}' * 9999).format(s) }}",
    "mapping format": LARGE + "{{ ('%(a)s' * 9999) % {'a': s} }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "macro calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro passed to itself": "{% macro f(g) %}{{ g(g) }}{% endmacro %}{{ f(f) }}",
    "chain of macros": "{% macro m0() %}{% endmacro %}"
    + "".join(f"{{% macro m{i + 1}() %}}{{{{ m{i}() }}}}{{{{ m{i}() }}}}{{% endmacro %}}" for i in range(40))
    + "{{ m40() }}",
    "caller": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 40 + "{% endcall %}" * 40,
    "slices": often("{% set x = s[::-1] %}"),
    "comparisons": often("{% if s ~ 'b' == t %}{% endif %}"),
    "substrings": often("{% if t in s %}{% endif %}"),
    "tests": often("{% if t is in s or s is lower %}{% endif %}"),
    "methods": often("{% set x = s.find(t) %}"),
    "filters": often("{% set x = s | upper %}"),
    "splits": often("{% set x = s.split('a') %}"),
    "many large values": "{% set ns = namespace(l=[]) %}" + often("{% set ns.l = ns.l + [s ~ i] %}"),
    "sorts": "{% for i in range(99999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "maxima": "{% for i in range(99999) %}{% set x = range(99999) | max %}{% endfor %}",
    "quadratic select": "{% set l = range(50000) | list %}{{ l | select('in', l) | list }}",
    "long attribute": "{{ range(9999) | sort(attribute='a' + ',a' * 99999) }}",
    "json of the messages": "{% for i in range(99999) %}{% for j in range(99) %}{% set x = messages | tojson %}{% endfor %}{% endfor %}",
    "batch": "{{ [1] | batch(10 ** 10, 1) | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "lipsum": "{{ lipsum(10 ** 10) }}",
    "number of digits": "{{ ('9' * 1000000) | int }}",
    "long date": "{{ strftime_now('%d' * 99999) }}",
    "many cycles": LARGE + "{% set j = joiner(s) %}{% for i in range(9999) %}{{ j() }}{% endfor %}",
    "parentheses": "{{ " + "(" * 99999 + ")" * 99999 + " }}",
    "brackets": "{{ " + "[" * 500 + "]" * 500 + " }}",
    "nots": "{{ " + "not " * 50000 + "1 }}",
    "long sum": "{{ 1" + " + 1" * 5000 + " }}",
    "dots": "{{ a" + ".a" * 5000 + " }}",
    "ifs": "{% if a %}" * 500 + "{% endif %}" * 500,
    "fors": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "large number": "{{ " + "9" * 99999 + " }}",
    "large source": "x" * (1 << 19),
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as x %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block x %}{% endblock %}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop(a) }}{% endfor %}",
    "change of a list": "{% set l = [] %}{{ l.append(1) }}",
    "change of the messages": "{{ messages.clear() }}",
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__.os }}",
    "underscore in a namespace": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "bytes": "{{ 'x'.encode() }}",
    "translate": "{{ 'x'.translate({120: 'y'}) }}",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_without_hanging_or_filling_memory(plain, attack, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 400_000)
    with pytest.raises(DamagedError) as error:
        ChatTemplate(ATTACKS[attack], plain, "chat_template.jinja").encode([user("x" * 100)])
    assert str(error.value).startswith("chat_template.jinja ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_internals_look_undefined(tokenizer, source):
    assert ChatTemplate(source, tokenizer).render([user("x")]) == ""


@pytest.mark.parametrize("attack", ["many large values", "lists of lists", "replace"])
def test_with_the_real_budget_memory_stays_small(plain, attack):
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="is refused: it "):
            ChatTemplate(ATTACKS[attack], plain).encode([user("x")])
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_a_long_history_has_room(tokenizer):
    messages = [user("x" * 1000) if i % 2 == 0 else assistant("y" * 1000) for i in range(401)]
    for source in (STRICT, CHATML):
        assert len(ChatTemplate(source, tokenizer).render(messages)) > 401_000


def test_one_large_message_has_room(tokenizer):
    text = "x" * 6_000_000
    assert text in strict(tokenizer).render([user(text)])
    assert text in ChatTemplate(CHATML, tokenizer).render([user(text)])


def test_lazy_filters_are_true_and_used_up_as_in_jinja(tokenizer):
    source = (
        "{% set empty = messages | selectattr('role', 'equalto', 'x') %}{{ 'true' if empty }}"
        "{% set m = messages | map(attribute='role') %}{{ m | list }}{{ m | list }}"
        "{{ messages | map(attribute='content') | first }}{{ messages | reverse | map(attribute='role') | join('-') }}"
    )
    text = ChatTemplate(source, tokenizer).render([user("a"), assistant("b")])
    assert text == "true['user', 'assistant'][]aassistant-user"


def test_several_threads_share_one_template(tokenizer):
    template = strict(tokenizer)
    wrong = []

    def render(i):
        for _ in range(20):
            if template.render([user(f"text {i}")]) != f"<s>[INST] text {i} [/INST]":
                wrong.append(i)

    threads = [threading.Thread(target=render, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
