"""What a model's text says, by vLLM's own parsers: thoughts, words and calls of tools.

In: the names of a tool-call and a reasoning parser, as vLLM spells them, the model's tokenizer, and
the ids of an answer. Out: `Parsed`. vLLM is imported when the first parser is asked for. Invariant:
the ids that were sampled are what is learned; a parser decides only what a client sees of them.
"""

import json
from typing import Any

from rft.agents.endpoint.chat_format import Asked, Parsed, cut


class Parser:
    """Both parsers of one model; a name that is None leaves its part in the text."""

    def __init__(self, tokenizer: Any, tool_call: str | None, reasoning: str | None) -> None:
        self.tokenizer, self.tool_call, self.reasoning = tokenizer, tool_call, reasoning

    def __call__(self, tokens: list[int], asked: Asked) -> Parsed:
        """`tokens`: without the one that ended the turn."""
        request = _request(asked)
        calls = self._calls(request) if self.tool_call and asked.tools else None
        if calls is not None:
            request = calls.adjust_request(request)
        text = self.tokenizer.decode(tokens, skip_special_tokens=request.skip_special_tokens)
        text = cut(text, asked.stop)
        thoughts, words = self._thoughts(text, request, asked) if self.reasoning else (None, text)
        if calls is None:
            return Parsed(words or "", thoughts, None)
        found = calls.extract_tool_calls(words or "", request)
        made = [(one.function.name, _arguments(one.function.arguments)) for one in found.tool_calls]
        return Parsed(found.content or "", thoughts, made)

    def _calls(self, request: Any) -> Any:
        from vllm.tool_parsers import ToolParserManager

        return ToolParserManager.get_tool_parser(str(self.tool_call))(self.tokenizer, request.tools)

    def _thoughts(self, text: str, request: Any, asked: Asked) -> tuple[str | None, str | None]:
        from vllm.reasoning import ReasoningParserManager

        cls = ReasoningParserManager.get_reasoning_parser(str(self.reasoning))
        variables = getattr(self.tokenizer, "template_args", {}) | asked.template_args
        parser = cls(self.tokenizer, chat_template_kwargs=variables)
        return parser.extract_reasoning(text, request)


def _request(asked: Asked) -> Any:
    """As vLLM's parsers want to see it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        model=asked.model, messages=asked.messages or [], tools=asked.tools or None
    )


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # as the model wrote it
        return text
