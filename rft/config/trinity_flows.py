"""Trinity-RFT's names of workflows and rewards: what each is here, or why there is none and what to
use instead.

In: a name of the reference; the sections of a file that name environments. Out: rft's name and what
is said of it, a sentence for one that is refused, `workflow_args` of the workflow `environment`.
Invariants: a name is mapped only where the meaning is the same (rewards have the same names here,
and so no rows); `REFUSED` has at most six workflows.
"""

import copy
from typing import Any

ENVIRONMENT = "environment"
JUDGE = "a judge that does not answer in its form is an error here, and no reward of 0"
TEACHER = "the trainer asks the teacher: algorithm.teacher_model_path instead of an auxiliary model"
NAMED = "name a reward beside it: there, none is an error"

WORKFLOWS: dict[str, tuple[str, str]] = {
    "simple_workflow": ("single_turn", NAMED),
    "async_simple_workflow": ("single_turn", NAMED),
    "math_workflow": ("math_think", ""),
    "async_math_workflow": ("math_think", ""),
    "math_boxed_workflow": ("math_boxed", ""),
    "async_math_boxed_workflow": ("math_boxed", ""),
    "bots_math_boxed_workflow": ("bots_math_boxed", ""),
    "examples.bots.workflow.bots_math_boxed_workflow.BOTSMathBoxedWorkflow": (
        "bots_math_boxed",
        "",
    ),
    "math_eval_workflow": ("math_eval", ""),
    "async_math_eval_workflow": ("math_eval", ""),
    "math_rm_workflow": ("single_turn", NAMED),
    "async_math_rm_workflow": ("single_turn", NAMED),
    "rubric_judge_workflow": ("rating", JUDGE),
    "async_rubric_judge_workflow": ("rating", JUDGE),
    "rubric_judge_openai_workflow": ("rating", f"{JUDGE}; it is one of explorer.auxiliary_models"),
    "math_ruler_workflow": ("math_ruler", JUDGE),
    "async_math_ruler_workflow": ("math_ruler", JUDGE),
    "math_trainable_ruler_workflow": ("trainable_ruler", ""),
    "learn2ask_workflow": ("learn_to_ask", f"{JUDGE}; prompts are in words of our own"),
    "toolcall_workflow": ("tool_call", ""),
    "tool_call_workflow": ("tool_call", ""),
    "on_policy_distill_workflow": ("unrewarded", TEACHER),
    "on_policy_distill_math_workflow": ("math_question", TEACHER),
    "sudoku_workflow": ("sudoku", ""),
    "thinking_budget_workflow": ("thinking_budget", ""),
    "agentscope_workflow_adapter": ("agent", "its function is workflow_args.agent"),
    "agentscope_workflow_adapter_v1": ("agent", "its function is workflow_args.agent"),
}

# name: `workflow_args` of the environment, and what its own are called there
ENVIRONMENTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "frozen_lake_workflow": (
        {
            "environment": "gymnasium",
            "env_id": "FrozenLake-v1",
            "max_step_num": 10,
            "env_args": {"is_slippery": False, "random_map": {"size": 4, "p": 0.8, "max_path": 8}},
        },
        {
            "env_max_steps": "env_args.random_map.max_path",
            "agent_max_steps": "max_step_num",
            "is_slippery": "env_args.is_slippery",
            "desc": "env_args.desc",
        },
    ),
    "alfworld_workflow": (
        {"environment": "textworld", "max_step_num": 30},
        {"max_env_steps": "max_step_num"},
    ),
    "step_wise_alfworld_workflow": (
        {"environment": "textworld", "max_step_num": 30, "per_turn": True},
        {"max_env_steps": "max_step_num"},
    ),
    "sciworld_workflow": ({"environment": "scienceworld", "max_step_num": 30}, {}),
    **dict.fromkeys(
        (
            "agentscope_react_workflow",
            "as_react_workflow",
            "agentscope_react_math_workflow",
            "agentscopev0_react_math_workflow",
        ),
        ({"environment": "agentscope"}, {"type": "env_args.type"}),
    ),
}
WORKFLOWS |= {name: (ENVIRONMENT, "docs/environments.md") for name in ENVIRONMENTS}

_ALFWORLD = (
    "it makes supervised rows of its own failures beside the rollouts: use alfworld_workflow, and "
    "algorithm_type=mix with rows that were made before"
)
REFUSED: dict[str, str] = {
    "RAFT_alfworld_workflow": _ALFWORLD,
    "RAFT_reflect_alfworld_workflow": _ALFWORLD,
    "email_search_workflow": (
        "it needs a mailbox of its own: use tool_use, with an MCP server that searches yours as "
        "workflow_args.mcp_servers, and a judge as the reward"
    ),
    "agentscope_v1_react_search_workflow": (
        "it needs the key of a search service: use tool_use, with that service's MCP server as "
        "workflow_args.mcp_servers"
    ),
    "webshop_workflow": (
        "WebShop is no package: it wants torch, a search index and a shop's data, none of which a "
        "registry has; where you have it, write a class of reset and step around its "
        "WebAgentTextEnv, and name that as workflow_args.environment of the workflow environment "
        "(docs/environments.md), with its Python as workflow_args.python"
    ),
    "intercode_sql_workflow": (
        "it needs a database per task: use tool_use, with an MCP server that runs SQL as "
        "workflow_args.mcp_servers"
    ),
}
IMAGES = "images are not in this round: rft trains text models"
OPEN_JUDGE = (
    "OpenJudge's graders are not called: use remote_judge, or the workflow rating with a judge "
    "under explorer.auxiliary_models"
)
WITHOUT: dict[str, str] = REFUSED | {
    **dict.fromkeys(("simple_mm_workflow", "async_simple_mm_workflow"), IMAGES),
    **dict.fromkeys(
        (
            "openjudge_reward",
            "trajectory_accuracy_grader_reward",
            "openjudge_trajectory_accuracy_reward",
            "openjudge_multi_grader_reward",
        ),
        OPEN_JUDGE,
    ),
}


def refusal(name: str) -> str | None:
    """What to say of a name that a config, or a row, has; None of one that it has not."""
    if name in WORKFLOWS:
        return f"it is {WORKFLOWS[name][0]} here: name that"
    return WITHOUT.get(name)


def asked_of_environments(file: dict[str, Any]) -> dict[str, Any]:
    """A file's config, in which every set whose workflow is an environment there has the
    `workflow_args` of `environment`.
    """
    buffer = file.get("buffer")
    given = buffer.get("explorer_input") if isinstance(buffer, dict) else None
    if not isinstance(given, dict):
        return file
    usual = given.get("default_workflow_type") or buffer.get("default_workflow_type")
    training = [given.get("taskset"), *_sets(given.get("tasksets"))]
    evaluation = _sets(given.get("eval_tasksets"))
    for sets, name in (
        (training, usual),
        (evaluation, given.get("default_eval_workflow_type") or usual),
    ):
        for one in filter(lambda found: isinstance(found, dict), sets):
            _ask(one, one.get("default_workflow_type") or name)
    return file


def _sets(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _ask(taskset: dict[str, Any], workflow: Any) -> None:
    if not isinstance(workflow, str) or workflow not in ENVIRONMENTS:
        return
    usual, names = ENVIRONMENTS[workflow]
    made: dict[str, Any] = copy.deepcopy(usual)
    for name, value in (taskset.get("workflow_args") or {}).items():
        *sections, word = names.get(name, name).split(".")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[word] = value
    taskset["workflow_args"] = made
