"""A model as the endpoint and workflows see it: its chat template, its tokenizer, the length of its
context and its engines.

    request ──► `prompt`: recorded ids and what is new, or the whole rendered ──► ids ──► engines
            ──► completions ──► `text`

One of them is the policy, whose answers are recorded; the others have weights that never change
(`explorer.auxiliary_models`). Invariant: text that an engine sampled is not tokenized again where a
recorded conversation goes on.
"""

from typing import Any

import msgspec
from jinja2 import TemplateError

from rft.agents.endpoint.chat_format import ApiError, Asked, behind, read
from rft.agents.endpoint.sessions import Continuation
from rft.config import ConfigError, ModelConfig
from rft.data.chat import chat_text, end_of_turn
from rft.ground import hubs
from rft.ground.experience import Completion, GenerateRequest, Sampling
from rft.rollout.pool import EnginePool


class Model:
    def __init__(
        self, name: str, tokenizer: Any, template: str | None, pool: EnginePool, max_model_len: int
    ):
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.pool = pool
        self.max_model_len = max_model_len
        self.stop_token = end_of_turn(tokenizer, template)

    def prompt(self, asked: Asked, place: Continuation | None) -> list[int]:
        """The ids to go on from. `place`: what they are of a conversation that is recorded."""
        if asked.messages is None:
            return (
                asked.prompt
                if isinstance(asked.prompt, list)
                else list(self.tokenizer.encode(asked.prompt))
            )
        try:
            if place is not None and (text := self._new(asked, place)) is not None:
                known, new = place.tokens, self._ids(text)
                # the end of the turn was sampled
                return known + (new[1:] if new[:1] == known[-1:] else new)
            return self._ids(self._render(asked, asked.messages))
        except (TemplateError, ConfigError) as error:
            raise ApiError(
                f"the chat template does not take these messages: {error}", "messages"
            ) from error

    def _new(self, asked: Asked, place: Continuation) -> str | None:
        """What the template writes behind the recorded answer."""
        assert asked.messages is not None
        answer = len(place.line.calls[place.call].messages) - 1
        return behind(lambda messages: self._render(asked, messages), asked.messages, answer)

    def _render(self, asked: Asked, messages: list[dict[str, Any]]) -> str:
        tools = {"tools": asked.tools} if asked.tools else {}
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
    ) -> list[Completion]:
        """`n` answers; max_tokens=0 is as many as there is room for."""
        room = self.max_model_len - len(prompt)
        sampling = msgspec.structs.replace(
            sampling, max_tokens=min(sampling.max_tokens or room, room)
        )
        request = GenerateRequest(
            request_id=request_id,
            prompt=prompt,
            n=n,
            sampling=sampling,
            stop_token_ids=[self.stop_token],
            stop=list(stop),
        )
        return await self.pool.generate(request)

    async def say(self, request_id: str, messages: list[dict[str, Any]], sampling: Sampling) -> str:
        """The text of one answer to a conversation of its own.

        Raises ApiError, a ValueError, for one that is too long.
        """
        asked = read({"messages": messages}, sampling)
        prompt = self.prompt(asked, None)
        self.check_room(prompt)
        [made] = await self.answer(request_id, prompt, sampling)
        return self.text(made.tokens)

    def check_room(self, prompt: list[int]) -> None:
        if self.max_model_len - len(prompt) <= 0:
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens, and the "
                f"prompt has {len(prompt)}: it must "
                "be shorter",
                "messages",
                code="context_length_exceeded",
            )

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def load_tokenizer(config: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    hubs.bring(config.model_path, weights=False, code=config.trust_remote_code)
    return AutoTokenizer.from_pretrained(
        config.model_path, trust_remote_code=config.trust_remote_code
    )
