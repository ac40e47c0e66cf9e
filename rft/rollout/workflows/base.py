"""What a workflow is, what it may ask for, and what it has to return.

In: a task and a context. Out: experiences that the trainer can learn from. Invariant: the ids of an
experience are those the engine saw and produced, the action mask is made where the tokens are, and
per-token lists have the length of the response (`check` says so, for user workflows too).
"""

from contextlib import AbstractAsyncContextManager
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from rft.ground.experience import Completion, Experience, Sampling, Task
from rft.rollout.reward_worker import RewardResult

if TYPE_CHECKING:
    from rft.rollout.access import Access, AgentSession


class WorkflowContext(Protocol):
    """What a workflow may ask for; the explorer makes one per attempt at a task."""

    def render(self, task: Task) -> list[int]:
        """Token ids of the task's prompt, chat template applied."""

    def follow(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids behind an assistant's words: the end of its turn, these messages, and where the
        assistant speaks again.
        """

    async def generate(
        self,
        prompt: list[int],
        n: int,
        sampling: Sampling,
        prompt_length: int | None = None,
        run: int | None = None,
    ) -> list[Completion]:
        """`n` continuations of the same ids, from one request. A prompt that is too long comes back
        with that stop.

        `prompt_length`: of a dialogue under way, how many ids are the task's own; the others only
        have to fit the model. `run`: which run of the task asks, where several do at once; seeds of
        a deterministic run depend on that, not on time.
        """

    def decode(self, tokens: list[int]) -> str:
        """Text of response tokens, without special ones."""

    async def score(
        self, task: Task, responses: list[str], tokens: list[int] | None = None
    ) -> list[RewardResult]:
        """Run the task's reward function on each response, in killable processes.

        `tokens`: how many each response has.
        """

    async def ask(
        self, messages: list[dict[str, Any]], model: str = "", sampling: Sampling | None = None
    ) -> str:
        """What an auxiliary model answers; `model` is its name under explorer.auxiliary_models,
        empty: the first.
        """

    def openai(self, model: str = "") -> "Access":
        """`base_url` and `api_key` for a client of OpenAI's API: of
        the policy, or of an auxiliary model.
        """

    def extract_experience_from_history(self, clear: bool = True) -> list[Experience]:
        """With `explorer.rollout_model.enable_history`: all model calls of this attempt so far, as
        experiences without reward.
        """

    def open_session(self, sampling: Sampling) -> "AgentSession":
        """A session of the endpoint for one run of an agent, until the end of this attempt."""

    def agent_slot(self) -> AbstractAsyncContextManager[None]:
        """Held while a process of an agent runs: `explorer.agent_processes`."""


class Workflow(Protocol):
    """Runs one task. Made anew for every attempt, so `self` may hold the state of an episode. `run`
    may also be a plain function: it then has a thread of its own, where the context's methods wait
    (`rft.rollout.workflows.threads`).

    A class may say `needs_judge = True`: it asks an auxiliary model, and is refused before the
    start where there is none; `needs_cell = True`: it runs foreign programs, and is refused where
    they cannot be isolated; `needs_template = True`: it speaks in chat messages. `compares_runs =
    True`: it judges the runs against each other, so part of them is never taken. `can_repeat =
    False`: it is called once per run of the task, all at the same time, each with `repeat_times` 1.
    """

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]: ...


def experience(
    task: Task,
    prompt: list[int],
    completion: Completion,
    result: RewardResult | None,
    sample: int = 0,
    turn: int = 0,
) -> Experience:
    """One experience of one turn; `result` None: there was nothing to score."""
    made = Experience(
        tokens=[*prompt, *completion.tokens],
        prompt_length=len(prompt),
        action_mask=[1] * len(completion.tokens),
        logprobs=completion.logprobs,
        versions=completion.versions,
        temperature=task.sampling.temperature,
        stop=completion.stop,
        sample=sample,
        turn=turn,
        task=task.id,
        routed_experts=completion.routed_experts,
    )
    return made if result is None else rewarded(made, result)


def rewarded(made: Experience, result: RewardResult) -> Experience:
    made.reward, made.reward_outcome = result.reward, result.outcome
    made.metrics = {**made.metrics, **result.metrics}
    if result.message:
        made.info = {**made.info, "reward_message": result.message}
    return made


def check(task: Task, experiences: list[Experience]) -> None:
    """Refuse, by name, what the trainer could not learn from or would learn wrongly from."""
    if not experiences:
        raise ValueError(f"workflow {task.workflow!r} returned no experience for task {task.id}")
    if not isinstance(experiences, list) or not all(
        isinstance(made, Experience) for made in experiences
    ):
        raise TypeError(
            f"workflow {task.workflow!r} must return a list of Experience, not {experiences!r:.80}"
        )
    for position, made in enumerate(experiences):
        if wrong := problem(made):
            raise ValueError(f"workflow {task.workflow!r}, experience {position}: {wrong}")


def problem(made: Experience) -> str | None:
    """What of an experience contradicts itself."""
    if not 0 < made.prompt_length <= len(made.tokens):
        return f"prompt_length {made.prompt_length}"
    per_token = {"action_mask": made.action_mask, "logprobs": made.logprobs}
    if made.token_rewards:
        per_token["token_rewards"] = made.token_rewards
    for name, values in per_token.items():
        if len(values) != made.response_length:
            return f"{len(values)} entries of {name} for {made.response_length} response tokens"
    for name, numbers in (
        ("reward", [made.reward]),
        ("logprobs", made.logprobs),
        ("token_rewards", made.token_rewards),
    ):
        if not all(map(isfinite, numbers)):
            return f"{name} is not finite"
    for span in made.versions:
        if not 0 <= span.start <= span.end <= made.response_length:
            return (
                f"version {span.version} of tokens {span.start} to {span.end}, but the response "
                f"has {made.response_length}"
            )
    return None


def numbered(task: Task, experiences: list[Experience]) -> None:
    """Which run of the task each belongs to: what the workflow said, or, where it said nothing, its
    place in the list.
    """
    if not any(made.sample or made.turn for made in experiences):
        for number, made in enumerate(experiences):
            made.sample = number
    places = [(made.sample, made.turn) for made in experiences]
    if double := next((place for place in places if places.count(place) > 1), None):
        raise ValueError(
            f"workflow {task.workflow!r} returned two experiences with sample {double[0]} and turn "
            f"{double[1]}: number the runs "
            "of a task by sample, and what one run made by turn"
        )
