"""Prompts as token ids: the one place where chat templates are applied, so that rollouts and SFT see the same tokens.

In: a task (or messages) and the model's tokenizer. Out: the ids of the prompt, ready for the assistant to go on, and
the id with which the assistant ends its turn. A plain prompt becomes one user message where there is a chat template.
"""

from typing import Any

from rft.config import ConfigError
from rft.experience import Task

_ANSWER = "[[answer]]"  # stands for an assistant's words when the end of its turn is looked up


def chat_text(
    tokenizer: Any, messages: list[dict[str, Any]], chat_template: str | None = None, add_generation_prompt: bool = True,
    **template_args: Any,
) -> str:  # fmt: skip
    """The conversation as the template writes it; `template_args` are its own, like `tools` or `enable_thinking`."""
    if not (chat_template or tokenizer.chat_template):
        raise ConfigError(
            "these rows have chat messages or a system prompt, but the model's tokenizer has no chat template: set "
            "model.chat_template_path or model.custom_chat_template, or use format.prompt_type=plaintext without one"
        )
    return tokenizer.apply_chat_template(
        messages,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **template_args,
    )


def render_messages(
    tokenizer: Any, messages: list[dict[str, Any]], chat_template: str | None = None, tools: list[dict[str, Any]] | None = None
) -> list[int]:  # fmt: skip
    """The ids of the conversation up to where the assistant begins to speak."""
    text = chat_text(tokenizer, messages, chat_template, tools=tools)
    return list(tokenizer.encode(text, add_special_tokens=False))  # the template has written the special tokens


def render_prompt(tokenizer: Any, task: Task, chat_template: str | None = None) -> list[int]:
    """The ids of the task's prompt, ready for the assistant's answer. `chat_template` wins over the tokenizer's own."""
    if not isinstance(task.prompt, str):
        return render_messages(tokenizer, task.prompt, chat_template)
    if chat_template or tokenizer.chat_template:
        return render_messages(tokenizer, [{"role": "user", "content": task.prompt}], chat_template)
    return list(tokenizer.encode(task.prompt))


def render_follow_up(tokenizer: Any, messages: list[dict[str, Any]], chat_template: str | None = None) -> list[int]:
    """The ids behind an assistant's words: the end of its turn, `messages`, and where the assistant speaks again.

    They do not depend on those words, so a dialogue goes on from the very ids that were sampled.
    """
    if not (chat_template or tokenizer.chat_template):
        return list(tokenizer.encode("".join(f"\n{m['content']}\n" for m in messages), add_special_tokens=False))
    before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    text = chat_text(tokenizer, [*before, *messages], chat_template)
    return list(tokenizer.encode(text.partition(_ANSWER)[2], add_special_tokens=False))


def end_of_turn(tokenizer: Any, chat_template: str | None = None) -> int:
    """The id that ends an assistant's turn: the template's special token behind its words, else the eos token."""
    if chat_template or tokenizer.chat_template:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        text = chat_text(tokenizer, messages, chat_template, add_generation_prompt=False)
        behind = tokenizer.encode(text.rpartition(_ANSWER)[2], add_special_tokens=False)
        if behind and behind[0] in special_ids(tokenizer):
            return behind[0]
    if tokenizer.eos_token_id is None:
        raise ConfigError("the model's tokenizer has no end-of-sequence token: set eos_token in tokenizer_config.json")
    return tokenizer.eos_token_id


def special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
