"""A model as the endpoint and workflows see it: its chat template, its tokenizer, the length of its
context and its engines.

    request ──► `prompt`: recorded ids and what is new, or the whole rendered ──► ids ──► engines
            ──► completions ──► `text`

One of them is the policy, whose answers are recorded; the others have weights that never change
(`explorer.auxiliary_models`). Invariant: text that an engine sampled is not tokenized again where a
recorded conversation goes on.
"""

import logging
from typing import Any

import msgspec

from rft.agents.endpoint.chat_format import ApiError, Asked, Parsed, behind, read
from rft.agents.endpoint.parsers import Parser
from rft.agents.endpoint.sessions import Continuation
from rft.config import ConfigError
from rft.data.chat import chat_text, end_of_turn
from rft.ground.experience import Completion, GenerateRequest, Sampling
from rft.rollout.answers import RunAnswers
from rft.rollout.engine_weights import RequestRefused
from rft.rollout.pool import EnginePool

log = logging.getLogger(__name__)


class Model:
    """`max_prompt`, `max_response`: of the model's own, where its context has room for more."""

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        template: str | None,
        pool: EnginePool,
        max_model_len: int,
        parser: Parser | None = None,
        max_prompt: int | None = None,
        max_response: int | None = None,
    ):
        self.max_prompt, self.max_response = max_prompt, max_response
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.pool = pool
        self.max_model_len = max_model_len
        self.parser = parser
        self.stop_token = end_of_turn(tokenizer, template)
        self.shows_tools = "tools" in str(template or tokenizer.chat_template)

    def prompt(self, asked: Asked, place: Continuation | None) -> list[int]:
        """The ids to go on from. `place`: what they are of a conversation that is recorded."""
        if isinstance(asked.prompt, list):
            if (largest := max(asked.prompt)) >= len(self.tokenizer):
                raise ApiError(f"the model has no token {largest}", "prompt")
            return asked.prompt
        if asked.messages is None:
            return list(self.tokenizer.encode(asked.prompt))
        try:
            if place is not None and (text := self._new(asked, place)) is not None:
                known, new = place.tokens, self._ids(text)
                # the end of the turn was sampled
                return known + (new[1:] if new[:1] == known[-1:] else new)
            return self._ids(self._render(asked, asked.messages))
        # templates are programs, which stumble over what they do not expect as any do
        except (ConfigError, TypeError, ValueError) as error:
            raise ApiError(
                f"the chat template does not take these messages: {error}", "messages"
            ) from error

    def _new(self, asked: Asked, place: Continuation) -> str | None:
        """What the template writes behind the recorded answer; None: it does not say so."""
        assert asked.messages is not None
        answer = len(place.line.calls[place.call].messages) - 1
        try:
            return behind(lambda messages: self._render(asked, messages), asked.messages, answer)
        except ConfigError:  # it takes no other answer there, but perhaps the real one
            return None

    def _render(self, asked: Asked, messages: list[dict[str, Any]]) -> str:
        tools = {"tools": asked.tools} if asked.tools else {}
        if tools and not self.shows_tools:
            self.shows_tools = True  # told once
            log.warning(
                "%s is asked with tools, and its chat template shows none: it knows of them only "
                "what messages say; give a template that does as model.chat_template_path",
                self.name,
            )
        return chat_text(self.tokenizer, messages, self.template, **tools, **asked.template_args)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def answer(
        self,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        n: int = 1,
        stop: tuple[str, ...] = (),
        answers: RunAnswers | None = None,
    ) -> list[Completion]:
        """`n` answers; max_tokens=0 is the model's own, or as many as there is room for.

        `answers`: of the run that asks, where they are durable before anybody hears them.
        """
        room = self.max_model_len - len(prompt)
        asked = sampling.max_tokens or self.max_response or room
        sampling = msgspec.structs.replace(sampling, max_tokens=min(asked, room))
        request = GenerateRequest(
            request_id=request_id,
            prompt=prompt,
            n=n,
            sampling=sampling,
            stop_token_ids=[self.stop_token],
            stop=list(stop),
        )
        try:
            if answers is not None:
                return await answers.complete(request)
            return await self.pool.generate(request)
        except RequestRefused as error:  # in Ray's envelope
            raise ApiError(str(getattr(error, "cause", error))) from error

    async def say(self, request_id: str, messages: list[dict[str, Any]], sampling: Sampling) -> str:
        """The text of one answer to a conversation of its own.

        Raises ApiError, a ValueError, for one that is too long.
        """
        asked = read({"messages": messages}, sampling)
        prompt = self.prompt(asked, None)
        self.check_room(prompt)
        [made] = await self.answer(request_id, prompt, sampling)
        return self.text(made.ids)

    def check_room(self, prompt: list[int]) -> None:
        if len(prompt) > (self.max_prompt or self.max_model_len - 1):
            raise ApiError(
                f"This model's maximum {'prompt' if self.max_prompt else 'context'} length is "
                f"{self.max_prompt or self.max_model_len} tokens, and the "
                f"prompt has {len(prompt)}: it must "
                "be shorter",
                "messages",
                code="context_length_exceeded",
            )

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def parsed(self, tokens: list[int], asked: Asked) -> Parsed | None:
        """An answer of a chat by the parsers that the config names; None: it names none."""
        if self.parser is None or asked.messages is None:
            return None
        ended = tokens[-1:] == [self.stop_token]
        return self.parser(tokens[:-1] if ended else tokens, asked)
