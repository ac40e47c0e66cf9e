"""Chat templates in the styles of six model families, small enough to read, each with a tokenizer
that knows its tokens.
"""

from dataclasses import dataclass
from typing import Any

from rft.tools.toy import character_tokenizer


@dataclass(frozen=True)
class Style:
    special: tuple[str, ...]
    end: str  # of an assistant's turn
    template: str


# Tools before the system prompt; thoughts of earlier turns are dropped, and the last turn gets a
# place for them.
QWEN = Style(
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "<|im_end|>",
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% "
    "endfor %}"
    "{% if tools %}<|im_start|>system\n"
    "{% for t in tools %}{{ t.name }}({{ t.takes }}) {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set words = m.content.split('</think>')[-1].strip() %}"
    "{% if loop.index0 > ns.last %}<think>{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[0].split('<think>')[-1] }}{% endif %}</think>{% endif %}{{ "
    "words }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
LLAMA3 = Style(
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
)
CHATML = Style(
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
# Nothing says that the assistant is to speak; its end of turn is the tokenizer's eos.
MISTRAL = Style(
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "</s>",
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
)
DEEPSEEK = Style(
    ("<bos>", "<User>", "<Assistant>", "<eos>", "<think>", "</think>"),
    "<eos>",
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == "
    "'user' %}<User>{{ m.content }}"
    "{% else %}<Assistant>{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant>{% endif %}",
)
# The last answer ends otherwise than those before it; a call of a tool with a token of its own.
HARMONY = Style(
    ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|return|>",
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}"
    " to={{ m.tool_calls[0].function.name }}<|message|>{}<|call|>"
    "{% else %}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
)
STYLES = {
    "qwen": QWEN,
    "llama3": LLAMA3,
    "chatml": CHATML,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
}


def tokenizer_of(style: Style) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(
        {"eos_token": style.end, "additional_special_tokens": list(style.special)}
    )
    tokenizer.chat_template = style.template
    return tokenizer


def shown(tokenizer: Any, ids: list[int], spans: list[tuple[int, int]]) -> str:
    """The text of the ids; what is learned stands in curly brackets."""
    text, at = "", 0
    for start, stop in spans:
        text += tokenizer.decode(ids[at:start]) + "{" + tokenizer.decode(ids[start:stop]) + "}"
        at = stop
    return text + tokenizer.decode(ids[at:])
