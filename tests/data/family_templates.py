"""Chat templates of model families as they are published, but for dates, wrong rows and, except Qwen3, descriptions of tools.

Each with the tokens that it writes, those that end generation, and whether it renders earlier turns otherwise later.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A template; `special` and `plain` are added tokens, `stops` those of generation_config.json."""

    template: str
    special: tuple[str, ...]
    eos: str
    stops: tuple[str, ...] = ()
    bos: str | None = None
    plain: tuple[str, ...] = ()


IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_CALLS = """
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}"""

QWEN25 = (
    """{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"""
    + QWEN_CALLS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

QWEN3_MESSAGES = (
    """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
           and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
                {{- content.lstrip('\n') }}
            {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}"""
    + QWEN_CALLS
)
QWEN3 = (
    QWEN3_MESSAGES
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)
QWEN3_THINKING = QWEN3_MESSAGES + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"

LLAMA2 = """{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA31 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}{{- "Cutting Knowledge Date: December 2023\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- "<|python_tag|>" + tool_call.name + ".call()" }}{{- "<|eom_id|>" }}
        {%- else  %}
            {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
            {{- "<|eot_id|>" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{- message.content }}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

LLAMA4 = """{{- bos_token }}{%- for message in messages %}
{{- '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}{{- message['content'] }}{{- "<|eot|>" }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{%- endif %}"""

MISTRAL1 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{- message['content'] + eos_token}}{% endif %}{% endfor %}"""

MISTRAL3 = """{{- bos_token }}{%- for message in messages %}
    {%- if message["role"] == "user" %}{{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}{{- tool_call.function|tojson }}{%- endfor %}{{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] ' + message.content + "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}"""

MISTRAL7 = """{{- bos_token }}{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}
{%- elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}
{%- elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """{% for message in messages %}{% if (message['role'] == 'system') %}
{{- '<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}
{{- '<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}
{{- '<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

GLM4 = """[gMASK]<sop>{% for item in messages %}
{%- if item['role'] == 'tool' %}{{ '<|observation|>\n' + item['content'] }}
{%- elif item['role'] == 'system' %}{{ '<|system|>\n' + item['content'] }}
{%- elif item['role'] == 'user' %}{{ '<|user|>\n' + item['content'] }}
{%- elif item['role'] == 'assistant' %}{{ '<|assistant|>\n' + item['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

GLM45 = """[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{%- set says_so = visible_text(m.content).endswith("/nothink") %}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not says_so) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- else %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' }}{{- m.content }}{{- '\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""

DEEPSEEK2 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}
{{- 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}
{{- message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

DEEPSEEK3 = """{{ bos_token }}{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] }}{%- endif %}
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' %}{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- endfor -%}{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}"""

DEEPSEEK_R1 = """{{ bos_token }}{%- for message in messages %}
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- endfor -%}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"""

DEEPSEEK31 = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(is_last_user=false, is_tool=false) %}{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- message['content'] }}{%- endif %}
    {%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{%- set ns.is_last_user = true -%}
        {{- '<｜User｜>' + message['content']}}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- if ns.is_last_user %}{{- '<｜Assistant｜>'}}
            {%- if message['prefix'] is defined and message['prefix'] and thinking %}{{- '<think>'}}
            {%- else %}{{- '</think>'}}{%- endif %}
        {%- endif %}
        {%- set ns.is_last_user = false -%}{%- set content = message['content'] -%}
        {%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}
        {{- content + '<｜end▁of▁sentence｜>'}}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}{{- '<｜Assistant｜>'}}
    {%- if not thinking %}{{- '</think>'}}{%- else %}{{- '<think>'}}{%- endif %}
{%- endif %}"""

KIMI_K2 = """{%- for message in messages -%}
{%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{%- endif -%}
{%- if message['role'] == 'system' -%}<|im_system|>system<|im_middle|>
{%- elif message['role'] == 'user' -%}<|im_user|>user<|im_middle|>
{%- elif message['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
{%- elif message['role'] == 'tool' -%}<|im_system|>tool<|im_middle|>{%- endif -%}
{%- if message['role'] == 'assistant' and message.get('tool_calls') -%}{{- message['content'] -}}<|tool_calls_section_begin|>
{%- for call in message['tool_calls'] -%}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{{- call['function']['arguments'] | tojson }}<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>
{%- else -%}{{ message['content'] }}{%- endif -%}<|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

GPT_OSS = """{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- "<|start|>developer<|message|># Instructions\n\n" + message.content + "<|end|>" }}
{%- elif message.role == 'assistant' -%}
    {%- if "thinking" in message and loop.last and not add_generation_prompt %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif %}
    {%- if loop.last and not add_generation_prompt %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
    {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- elif message.role == 'user' -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

OLMO2 = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}
{%- elif message['role'] == 'assistant' %}{% if not loop.last %}
{{- '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}
{{- '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

OLMO3 = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{{ '<|im_start|>assistant\n' + message['content'] }}
    {%- if not loop.last -%}{{ '<|im_end|>' + '\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
{%- else -%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endif -%}
{%- if loop.last and add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}{%- endfor -%}"""

SMOLLM3 = """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\n## Metadata\n\nReasoning Mode: " + reasoning_mode + "\n\n<|im_end|>\n" -}}
{%- for message in messages -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>user\n" + message.content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\n" + message.content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" + message.content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\n" }}
    {%- else -%}{{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" }}{%- endif -%}
{%- endif -%}"""

GRANITE3 = """{%- for message in messages %}
{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}{%- endfor %}"""

SEED_OSS = """{%- for message in messages %}{{- bos_token + message.role + "\n" }}
{%- if message.role == "assistant" and message.reasoning_content is string and message.reasoning_content | trim | length > 0 -%}
{{- "<seed:think>" + message.reasoning_content | trim + "</seed:think>" }}{%- endif -%}
{{- message.content + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- bos_token + "assistant\n" }}
{%- if thinking_budget == 0 %}{{- "<seed:think></seed:think>" }}{%- endif %}{%- endif %}"""

MINIMAX = """{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '<beginning_of_sentence>user name=user\n' + message['content'] + '<end_of_sentence>\n' }}
{%- elif message['role'] == 'assistant' %}{{ '<beginning_of_sentence>ai name=assistant\n' }}
{%- generation %}{{ message['content'] }}{% endgeneration %}{{ '<end_of_sentence>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<beginning_of_sentence>ai name=assistant\n' }}{% endif %}"""

ZEPHYR = """{% for message in messages %}\n{% if message['role'] == 'user' %}\n
{{- '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n
{{- '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n
{{- '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n
{%- if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"""

VICUNA = """{{ bos_token }}{{ 'A chat between a curious user and an artificial intelligence assistant.' }}
{%- for message in messages %}{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""

_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink")
_GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_KIMI = (
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|im_end|>",
    "[EOS]",
    "<|tool_calls_section_begin|>",
)
_KIMI_CALLS = ("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_GEMMA = ("<start_of_turn>", "<end_of_turn>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
_PHI3 = ("<s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>")


def _deepseek(template: str) -> Family:
    return Family(template, _DEEPSEEK, _DEEPSEEK[1], (_DEEPSEEK[1],), _DEEPSEEK[0], ("<think>", "</think>"))


def _old(template: str, *more: str, **fields: str) -> Family:
    return Family(template, ("<s>", "</s>", *more), "</s>", ("</s>",), "<s>", **fields)  # type: ignore[arg-type]


FAMILIES = {
    "ChatML": Family(CHATML, IM, "<|im_end|>"),
    "Qwen2": Family(QWEN2, IM, "<|im_end|>", QWEN_STOPS),
    "Qwen2.5": Family(QWEN25, IM, "<|im_end|>", QWEN_STOPS, plain=THINK[2:]),
    "Qwen3": Family(QWEN3, IM, "<|im_end|>", QWEN_STOPS, plain=THINK),
    "Qwen3-Thinking": Family(QWEN3_THINKING, IM, "<|im_end|>", QWEN_STOPS, plain=THINK),
    "Llama 2": _old(LLAMA2),
    "Llama 3": Family(LLAMA3, _LLAMA3, "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>"), "<|begin_of_text|>"),
    "Llama 3.1": Family(
        LLAMA31, (*_LLAMA3, "<|python_tag|>"), "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
    ),
    "Llama 4": Family(
        LLAMA4, ("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"), "<|eot|>",
        ("<|end_of_text|>", "<|eom|>", "<|eot|>"), "<|begin_of_text|>",
    ),
    "Mistral v1": _old(MISTRAL1),
    "Mixtral": _old(MISTRAL1),
    "Mistral v3": _old(MISTRAL3, "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "Mistral v7": _old(MISTRAL7, "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "Gemma 2": Family(GEMMA, ("<bos>", "<eos>", *_GEMMA), "<eos>", ("<eos>", "<end_of_turn>"), "<bos>"),
    "Gemma 3": Family(GEMMA, ("<bos>", "<eos>"), "<eos>", ("<eos>", "<end_of_turn>"), "<bos>", _GEMMA),
    "Phi-3": Family(PHI3, _PHI3, "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>"), "<s>"),
    "Phi-4": Family(PHI4, (*IM, "<|im_sep|>"), "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    "GLM-4": Family(GLM4, _GLM, "<|endoftext|>", _GLM_STOPS),
    "GLM-4.5": Family(GLM45, _GLM, "<|endoftext|>", _GLM_STOPS, plain=THINK),
    "GLM-4.6": Family(GLM45, _GLM, "<|endoftext|>", _GLM_STOPS, plain=THINK),
    "DeepSeek-V2": _deepseek(DEEPSEEK2),
    "DeepSeek-V3": _deepseek(DEEPSEEK3),
    "DeepSeek-V3.1": _deepseek(DEEPSEEK31),
    "DeepSeek-R1": _deepseek(DEEPSEEK_R1),
    "Kimi-K2": Family(KIMI_K2, (*_KIMI, *_KIMI_CALLS), "[EOS]", ("<|im_end|>",)),
    "gpt-oss": Family(GPT_OSS, _HARMONY, "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>")),
    "OLMo 2": Family(OLMO2, ("<|endoftext|>",), "<|endoftext|>", ("<|endoftext|>",), "<|endoftext|>"),
    "OLMo 3": Family(OLMO3, IM, "<|endoftext|>", QWEN_STOPS),
    "SmolLM2": Family(QWEN2, IM, "<|im_end|>", ("<|im_end|>",)),
    "SmolLM3": Family(SMOLLM3, IM, "<|im_end|>", ("<|im_end|>",), plain=THINK),
    "Granite 3": Family(GRANITE3, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), "<|end_of_text|>"),
    "Seed-OSS": Family(SEED_OSS, ("<seed:bos>", "<seed:eos>"), "<seed:eos>", ("<seed:eos>",), "<seed:bos>"),
    "MiniMax": Family(
        MINIMAX, ("<beginning_of_sentence>", "<end_of_sentence>"), "<end_of_sentence>", ("<end_of_sentence>",)
    ),
    "Zephyr": _old(ZEPHYR),
    "Vicuna": _old(VICUNA),
}  # fmt: skip
"""By name."""
