"""Lakes of 3 x 3 fields for gymnasium's FrozenLake: all that have one or two holes and can be
crossed, start and goal anywhere.

Out: rows of lakes, some of them held out, and dialogues that cross the others half at random.
"""

import random
from collections.abc import Iterator
from itertools import chain, combinations, permutations
from pathlib import Path

SIDE, TURNS = 3, 6
HOLES = (1, 2)
STEPS = 240
ANSWER_TOKENS = 2
MOVES = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}
GOOD = 0.5  # share of the warm-up's moves that lead to the goal; the others are random
COINS = Path(__file__).with_name("coins.py")
Lake = tuple[str, ...]
Row = dict[str, object]


def tasks(seed: int) -> list[Row]:
    all_ = lakes()
    random.Random(seed).shuffle(all_)
    return [{"prompt": "lake", "response": "", "env_args": {"desc": list(one)}} for one in all_]


def arguments(shuffled: bool) -> Row:
    """`workflow_args`."""
    return {
        "environment": f"{COINS}:Coins" if shuffled else "gymnasium",
        "env_id": "FrozenLake-v1",
        "python": "gym",
        "max_step_num": TURNS,
        "episodes": 256,
        "env_args": {"is_slippery": False, "instructions": ""},
    }


def lakes() -> list[Lake]:
    """All that can be crossed."""
    fields, found = range(SIDE * SIDE), []
    for start, goal in permutations(fields, 2):
        rest = [at for at in fields if at not in (start, goal)]
        for holes in chain.from_iterable(combinations(rest, number) for number in HOLES):
            letters = {start: "S", goal: "G"} | dict.fromkeys(holes, "H")
            text = "".join(letters.get(at, "F") for at in fields)
            lake = tuple(text[at : at + SIDE] for at in range(0, len(text), SIDE))
            if place(lake, "S") in distances(lake):
                found.append(lake)
    return found


def place(lake: Lake, letter: str) -> tuple[int, int]:
    """Where the start or the goal is."""
    return divmod("".join(lake).index(letter), SIDE)


def distances(lake: Lake) -> dict[tuple[int, int], int]:
    """Moves from each field, that is no hole, to the goal."""
    goal = place(lake, "G")
    found, todo = {goal: 0}, [goal]
    for at in todo:
        for move in MOVES.values():
            there = moved(at, move)
            if there not in found and lake[there[0]][there[1]] != "H":
                found[there] = found[at] + 1
                todo.append(there)
    return found


def moved(at: tuple[int, int], move: tuple[int, int]) -> tuple[int, int]:
    y, x = at[0] + move[0], at[1] + move[1]
    return max(0, min(SIDE - 1, y)), max(0, min(SIDE - 1, x))


def shown(lake: Lake, at: tuple[int, int]) -> str:
    """As the environment shows it."""
    return "\n".join(
        "".join("P" if (y, x) == at else letter for x, letter in enumerate(row))
        for y, row in enumerate(lake)
    )


def dialogues(rows: list[Row], count: int, seed: int) -> Iterator[Row]:
    """Each over one of these rows' lakes."""
    draw = random.Random(seed)
    for _ in range(count):
        yield {"messages": _walk(draw, tuple(draw.choice(rows)["env_args"]["desc"]))}


def _walk(draw: random.Random, lake: Lake) -> list[dict[str, str]]:
    at, messages = place(lake, "S"), []
    while lake[at[0]][at[1]] not in "HG" and len(messages) < 2 * TURNS:
        letter = draw.choice("ldru") if draw.random() >= GOOD else best(draw, lake, at)
        messages += [
            {"role": "user", "content": shown(lake, at)},
            {"role": "assistant", "content": letter},
        ]
        at = moved(at, MOVES[letter])
    return messages


def best(draw: random.Random, lake: Lake, at: tuple[int, int]) -> str:
    far = distances(lake)
    return draw.choice([m for m in MOVES if far.get(moved(at, MOVES[m]), 99) < far[at]])
