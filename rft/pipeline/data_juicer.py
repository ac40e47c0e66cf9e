"""data_juicer: the experiences of a group go through operators of a Data-Juicer service.

In: experiences with their texts. Out: those that the service kept; what it computed (`__dj__stats__`) is in their `info`. The
service sees the columns index, prompt_text, response_text, reward, prompt_length, response_length and task. A reward that it
changed is taken; texts that it changed are not: the trainer learns from the tokens that were sampled.
"""

from typing import Any

from rft.config import DataJuicerConfig
from rft.experience import Experience
from rft.pipeline.experience_operators.reward_shaping import is_number
from rft.pipeline.juicer_client import JuicerClient, JuicerError, Refused

STATS = "__dj__stats__"
NO_SESSION = 404


class DataJuicer:
    """`config_path`: a Data-Juicer file, as the service sees it; or `operators`: [{name: {argument: value}}]; `np` processes."""

    def __init__(
        self, service: DataJuicerConfig, config_path: str | None = None, operators: list[dict[str, Any]] | None = None, np: int = 4
    ) -> None:  # fmt: skip
        if not config_path and not operators:
            raise ValueError("neither config_path nor operators is given")
        for number, one in enumerate(operators or []):
            if not isinstance(one, dict) or len(one) != 1:
                raise ValueError(f"operators.{number} is {one}; write {{name: {{argument: value}}}}")
        if int(np) < 1:
            raise ValueError("np must be 1 or more")
        self.service = service
        self.config = {"pipeline_type": "experience", "operators": operators, "config_path": config_path, "np": int(np)}
        self.session: str | None = None

    async def prepare(self) -> None:
        self.client = JuicerClient(str(self.service.server_url), self.service.timeout)
        self.session = await self.client.create(self.config)

    async def close(self) -> None:
        await self.client.close(self.session)

    async def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        rows = [row_of(number, experience) for number, experience in enumerate(experiences)]
        try:
            found, metrics = await self.client.process_experience(str(self.session), rows)
        except Refused as error:
            if error.status != NO_SESSION:
                raise
            self.session = await self.client.create(self.config)  # the service has been started anew since
            found, metrics = await self.client.process_experience(self.session, rows)
        kept = [taken(experiences, row) for row in found]
        if len({id(one) for one in kept}) != len(kept):
            raise JuicerError("the service gave a row back twice")
        return kept, {"filtered_count": len(experiences) - len(kept), **metrics}


def row_of(number: int, experience: Experience) -> dict[str, Any]:
    return {
        "index": number,
        "prompt_text": str(experience.info.get("prompt_text", "")),
        "response_text": str(experience.info.get("response_text", "")),
        "reward": float(experience.reward),
        "prompt_length": experience.prompt_length,
        "response_length": experience.response_length,
        "task": experience.task,
    }


def taken(experiences: list[Experience], row: dict[str, Any]) -> Experience:
    """The experience that a row was, with what the service found out."""
    number = row.get("index")
    if not isinstance(number, int) or not 0 <= number < len(experiences):
        raise JuicerError(f"the service gave back a row with index {number!r}, of {len(experiences)} experiences")
    experience = experiences[number]
    stats = row.get(STATS) or {}
    if not isinstance(stats, dict):
        raise JuicerError(f"the service gave {STATS}={str(stats)[:80]}, which is no object")
    experience.info |= {str(name): value for name, value in stats.items() if value is not None}
    if is_number(reward := row.get("reward")):
        experience.reward = float(reward)  # type: ignore[arg-type]
    return experience
