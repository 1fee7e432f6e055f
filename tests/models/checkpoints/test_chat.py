"""Chat templates against transformers' `apply_chat_template`, and templates that do harm."""

import json
import re
import shutil
import time
from datetime import datetime

import pytest

from gspmd_models.checkpoints import CheckpointError, Tokenizer, byte_tokenizer, tokenizer
from gspmd_models.checkpoints import chat as chats
from tests.models.checkpoints.tokenizing import BEGIN, END, byte_level, folder, pieces, with_step

# Small templates of the forms that published models have.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools> {\\"name\\": <name>}<|im_end|>\\n" }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
"""
CHATML = """\
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}

    {% else %}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
OTHERS = """\
{%- macro shown(value, level=0) -%}{{ value | tojson(indent=level) }}{%- endmacro -%}
{% for message in messages %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
{{ dict(role=message.role) | tojson }} {{ shown(message, 1) }} {{ "%s|%5.2f" | format(message.role, 1.5) }}
{% endfor %}
{{ '{:>8}'.format('x') }} {{ messages | map(attribute='role') | join(', ') }} {{ pad_token }} {{ nothing }}
{{ {'é': '<&>'} | tojson }} {{ dict.fromkeys(['a'], 1) }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ strftime_now('%Y-%m') }}

"""
TEMPLATES = {
    "llama": LLAMA3, "qwen": QWEN, "gemma": GEMMA, "mistral": MISTRAL, "chatml": CHATML, "deepseek": DEEPSEEK,
    "others": OTHERS,
}  # fmt: skip
USER, ANSWER = (
    {"role": "user", "content": "  Was ist <b>2+2</b>? 日本 \n"},
    {"role": "assistant", "content": "4 </s> 5"},
)
CHATS = [
    [USER],
    [USER, ANSWER, {"role": "user", "content": ""}],
    [{"role": "system", "content": "Be brief. "}, USER],
    [
        USER,
        ANSWER | {"content": "<think>\nhm\n</think>\n\nyes"},
        USER,
        ANSWER | {"reasoning_content": "so", "name": None},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "number"}}}}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_that_of_transformers(transformers, name, tmp_path):
    """Text and ids; a template that refuses messages refuses them in both."""
    entries = {"bos_token": BEGIN, "eos_token": END, "chat_template": TEMPLATES[name]}
    at = [folder(tmp_path / make.__name__, with_step(make(), "both"), entries) for make in (byte_level, pieces)]
    of_bytes, of_pieces = (transformers.AutoTokenizer.from_pretrained(str(each)) for each in at)
    found, other = (tokenizer(each) for each in at)
    for number, messages in enumerate(CHATS):
        variables = {"tools": TOOLS, "enable_thinking": False} if number % 2 else {}
        for prompt in (True, False) if number == 1 else (True,):
            arguments = {"add_generation_prompt": prompt, **variables}
            try:
                text = of_bytes.apply_chat_template(messages, tokenize=False, **arguments)
            except Exception as error:
                assert name in ("gemma", "mistral")
                with pytest.raises(CheckpointError, match=re.escape(str(error))):
                    found.chat(messages, prompt=prompt, **variables)
                continue
            assert found.chat_text(messages, prompt=prompt, **variables) == text
            ids = of_pieces.apply_chat_template(messages, return_dict=False, **arguments)
            assert other.chat(messages, prompt=prompt, **variables) == ids
            assert found.encode(text, special=False) == of_bytes.encode(text, add_special_tokens=False)


def spoken(source, **named):
    return Tokenizer(byte_tokenizer().backend, templates={"default": source} | named)


def test_a_template_is_found_where_transformers_finds_it(transformers, tmp_path):
    """A file counts before the entry of tokenizer_config.json; further ones have names."""
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    more = {"bos_token": BEGIN, "eos_token": END}

    def both(**options):
        wanted = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        ours = {"template": options["chat_template"]} if "chat_template" in options else {}
        ours |= {"tools": options["tools"]} if "tools" in options else {}
        text = tokenizer(tmp_path).chat_text([USER], **ours)
        assert text == wanted.apply_chat_template([USER], tokenize=False, **options)
        return text

    folder(tmp_path, byte_level(), more | {"chat_template": "C"})
    assert both() == "C"
    folder(tmp_path, byte_level(), more | {"chat_template": several})
    assert (both(), both(chat_template="tool_use"), both(tools=TOOLS)) == ("D", "T", "T")
    (tmp_path / "chat_template.jinja").write_text("F")
    assert both() == "F"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert (both(), both(chat_template="rag")) == ("F", "R")


def test_templates_are_saved_with_the_tokenizer(tmp_path):
    for templates in ({"default": "a"}, {"default": "a", "rag": "b"}):
        Tokenizer(byte_tokenizer().backend, templates=templates).save(tmp_path)
        assert tokenizer(tmp_path).templates == templates


def test_a_missing_template_is_one_message(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"has no chat template: neither chat_template\.jinja nor chat_template in"
    ):
        byte_tokenizer().chat([USER])
    with pytest.raises(CheckpointError, match=r"there is no chat template 'rag'; use one of 'default', 'tool_use'\."):
        spoken("x", tool_use="y").chat([USER], template="rag")
    with pytest.raises(CheckpointError, match=r"the chat templates are 'a', 'b', but none is the default; choose one"):
        Tokenizer(byte_tokenizer().backend, templates={"a": "", "b": ""}).chat([USER])
    for entry in (3, [{"name": "default"}], {"default": "x"}):
        folder(tmp_path, byte_level(), {"chat_template": entry})
        with pytest.raises(CheckpointError, match=r"chat_template of tokenizer_config\.json must be a string, or a"):
            tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "there are no messages; give at least one"),
        (["Hi!"], "message 1 is 'Hi!'; it must be like"),
        ([USER, {"content": "Hi!"}], "message 2 is {'content': 'Hi!'}; it must be like"),
        ([{"role": "user", "content": b"Hi!"}], "messages must be plain data, as in JSON: Object of type bytes"),
    ],
)
def test_faulty_messages_are_one_message(messages, fault):
    with pytest.raises(CheckpointError, match=fault):
        spoken("x").chat(messages)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("a\n{% for x in %}", ", line 2: Expected an expression, got 'end of statement block'"),
        ("a\n\n{{ messages[0].a.b }}", ", line 3: 'dict object' has no attribute 'a'"),
        ("{{ 1 + messages[0].role }}", ", line 1: TypeError: unsupported operand type"),
        ("\n{{ raise_exception('no such turn') }}", ", line 2: no such turn"),
        ("{{ messages.append(1) }}", ", line 1: access to attribute 'append' of 'list' object is unsafe"),
        (
            "{{ ''.__class__ }}{{ ''.__class__.mro() }}",
            ", line 1: access to attribute '__class__' of 'str' object is un",
        ),
        ("{{ dict.__init__.__globals__ }}", ", line 1: access to attribute '__init__' of 'Dict' object is unsafe"),
        ("{{ raise_exception.__globals__.sys }}", ", line 1: access to attribute '__globals__' of 'function'"),
        ("{% set a = namespace(__class__=1) %}", ", line 1: '__class__', a name with an underscore, cannot be set"),
        ("{% include 'x' %}", ", line 1: TypeError: no loader for this environment specified"),
        ("{{ range(10**9) | list | length }}", ", line 1: OverflowError: Range too big"),
    ],
)
def test_a_faulty_template_is_one_message(source, fault):
    with pytest.raises(CheckpointError) as caught:
        spoken(source).chat([USER])
    said = str(caught.value).splitlines()
    assert said[0] == "cannot render a chat:"
    assert said[1].startswith(f"  chat template 'default'{fault}")
    assert said[2].startswith("  Change the messages, use another template (--chat-template NAME)")
    assert len(said) == 3


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "it takes more than (2|12) seconds",  # of the processor, or, on a busy machine, of the clock
        ),
        (
            "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "bytes of memory",
        ),
        ("{{ 'a' * 10**10 }}", "bytes of memory"),
        ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "it writes more than 16,777,216 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_does_not_end_is_ended(source, fault, monkeypatch):
    monkeypatch.setattr(chats, "_SECONDS", 2)
    monkeypatch.setattr(chats, "_BYTES", 2**28)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=fault):
        spoken(source).chat([USER])
    assert time.monotonic() - began < 30


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps, which every macOS has")
def test_where_the_system_bounds_no_memory_it_is_watched(monkeypatch):
    """Without a limit of the system, as on macOS, the process is ended once it holds too much."""
    monkeypatch.setattr(chats, "_WATCHED", True)
    monkeypatch.setattr(chats, "_BYTES", 2**28)
    assert spoken("{{ messages[0].content }}").chat_text([USER]) == USER["content"]
    hoard = "{% set n = namespace(x='ab' * 2**20) %}{% for a in range(8) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    wait = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="it takes more than 268,435,456 bytes of memory"):
        spoken(hoard + wait).chat([USER])
    assert time.monotonic() - began < 30
    monkeypatch.setattr(chats, "_SECONDS", 1)
    with pytest.raises(CheckpointError, match=r"it takes more than [16] seconds"):  # of the processor, or in all
        spoken(wait).chat([USER])


def test_the_date_is_that_of_today():
    days = {datetime.now().strftime("%d %b %Y")}
    text = spoken("{{ strftime_now('%d %b %Y') }}").chat_text([USER])
    assert text in days | {datetime.now().strftime("%d %b %Y")}


def test_variables_are_those_that_are_given():
    assert (
        spoken("{{ a }}{{ b | tojson }}{{ documents }}").chat_text([USER], a=1, b=[{"x": "é"}]) == '1[{"x": "é"}]None'
    )
    assert json.loads(spoken("{{ messages | tojson }}").chat_text([USER, ANSWER])) == [USER, ANSWER]
