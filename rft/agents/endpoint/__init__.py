"""The endpoint's life in the explorer: made when the run wants it, with the models that it serves,
and ended with the explorer.

In: what the supervisor says (`OpenAIEndpointFactory`), the policy's tokenizer and engines, a way to
store what sessions made. Out: a listening `OpenAIEndpoint`, and its address and key in a file that
only the owner of the run can read. Invariants: the key is nowhere else; the server, and OpenAI's
library, are imported where it listens, not by the supervisor.
"""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.agents.endpoint.parsers import Parser
from rft.agents.endpoint.registry import Registry
from rft.agents.endpoint.served_models import Model
from rft.config import AuxiliaryModelConfig, EngineConfig, ExplorerConfig, ModelConfig
from rft.data.chat import load_tokenizer
from rft.ground import hubs
from rft.ground.surroundings import TOKEN
from rft.rollout.pool import EngineHandle, EnginePool
from rft.rollout.served import ServedGroups

if TYPE_CHECKING:
    from rft.agents.endpoint.server import OpenAIEndpoint

FILE = "endpoint.json"  # in the job's directory


@dataclass(frozen=True)
class OpenAIEndpointFactory:
    """`auxiliary`: engines by name, for each of `explorer.auxiliary_models`.

    `group_size`: of what mode=serve stores.
    """

    directory: str
    serves: bool = False
    group_size: int = 1
    auxiliary: dict[str, dict[str, EngineHandle]] = field(default_factory=dict)

    async def start(
        self,
        config: ExplorerConfig,
        model: ModelConfig,
        tokenizer: Any,
        pool: EnginePool,
        groups: ServedGroups,
    ) -> "OpenAIEndpoint":
        """`groups` are of mode=serve only: elsewhere sessions are those of workflows, which return
        what they made.
        """
        from rft.agents.endpoint.server import OpenAIEndpoint

        name = hubs.title(str(model.model_path))
        policy = Model(
            name,
            tokenizer,
            model.custom_chat_template,
            pool,
            int(model.max_model_len or 0),
            _parser(config.rollout_model, tokenizer),
        )
        others = [_auxiliary(one, self.auxiliary[one.name]) for one in config.auxiliary_models]
        token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
        if self.serves:
            await groups.begin()
        registry = Registry(
            token, config.session_timeout, groups.store if self.serves else None, self.group_size
        )
        endpoint = OpenAIEndpoint(registry, [policy, *others], Path(self.directory) / FILE)
        await endpoint.start(config.listen_address, config.proxy_port)
        return endpoint


def _auxiliary(config: AuxiliaryModelConfig, engines: dict[str, EngineHandle]) -> Model:
    model = ModelConfig(
        model_path=config.model_path,
        trust_remote_code=config.trust_remote_code,
        enable_thinking=config.enable_thinking,
    )
    tokenizer = load_tokenizer(model)
    return Model(
        config.name,
        tokenizer,
        config.custom_chat_template,
        EnginePool(engines),
        int(config.max_model_len or 0),
        _parser(config, tokenizer),
        config.max_prompt_tokens,
        config.max_response_tokens,
    )


def _parser(config: EngineConfig, tokenizer: Any) -> Parser | None:
    named = config.tool_call_parser, config.reasoning_parser
    return Parser(tokenizer, *named) if any(named) else None
