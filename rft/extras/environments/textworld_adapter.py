"""TextWorld: games of text, made and compiled for a seed, or from files that are there.

In: a command. Out: what the game says; the reward is the share of its points that the command
earned. A row's `game_file` (or `env_id`) names a game; else one is made of `env_args`: rooms,
objects, quest_length, and kept in `games`, because to compile takes seconds. Invariant: a command
changes nothing but its own game: what the interpreter, and not the game, would do (save, restore,
quit, ...) is not asked.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import textworld

# it reads C strings, so that it hangs or dies of a zero; other control characters mean nothing
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# games have a `type Q latchkey`, or a `Q-key`
OF_INTERPRETER = re.compile(
    r"\b(save|restore|restart|quit|(?<!type )q(?!-)|undo|verify|script|transcript|notranscript"
    r"|noscript|unscript|recording|replay)\b",
    re.IGNORECASE,
)
GAMES = Path(tempfile.gettempdir()) / f"rft-textworld-{os.getuid()}"


class TextWorld:
    packages = {"textworld": ("1",)}
    alone = True  # its parsers are no friends of threads

    @classmethod
    def prepare(cls, env_id: str = "", games: str = str(GAMES), **args: Any) -> None:
        Path(games).mkdir(parents=True, exist_ok=True)
        cls(env_id, games, **args)
        if env_id:
            there(env_id)

    def __init__(
        self,
        env_id: str = "",
        games: str = str(GAMES),
        rooms: int = 2,
        objects: int = 4,
        quest_length: int = 2,
        commands: bool = True,
    ) -> None:
        """`commands`: the game's admissible commands are shown with each observation."""
        self.env_id, self.games, self.commands = env_id, Path(games), commands
        self.size = (rooms, objects, quest_length)
        self.env: Any = None

    def reset(self, task: "dict[str, Any]") -> str:
        file = task["raw"].get("game_file") or self.env_id
        path = there(file) if file else self.made(int(task["seed"]))
        asked = textworld.EnvInfos(
            **dict.fromkeys(("max_score", "score", "won", "objective", "description"), True),
            admissible_commands=True,
        )
        self.env = textworld.start(str(path), request_infos=asked)
        self.state = self.env.reset()
        # what it says first has a banner before that
        first = (self.state.objective, self.state.description)
        return self.shown("\n".join(first) if all(first) else self.state.feedback)

    def step(self, action: str) -> "tuple[str, float, bool, dict[str, float]]":
        before = self.state.score or 0
        words = CONTROL.sub(" ", (action.strip().splitlines() or ["look"])[-1])
        if found := OF_INTERPRETER.search(words):
            return (
                self.shown(f"{found[0]} is no command of this game."),
                0.0,
                False,
                {"unread": 1.0},
            )
        self.state, _, done = self.env.step(words)
        earned = (self.state.score or 0) - before
        if not self.state.max_score:  # games of PDDL only know whether they are won
            earned, most = float(bool(self.state.won)), 1.0
        else:
            most = float(self.state.max_score)
        return (
            self.shown(self.state.feedback),
            earned / most,
            bool(done),
            {"won": float(bool(self.state.won))},
        )

    def made(self, seed: int) -> Path:
        rooms, objects, quest_length = self.size
        path = self.games / f"{rooms}-{objects}-{quest_length}-{seed}.z8"
        if not path.exists():
            options = textworld.GameOptions()
            options.seeds, options.force_recompile = seed, True
            options.nb_rooms, options.nb_objects = rooms, objects
            options.quest_length = quest_length
            options.path = str(path.with_name(f"{os.getpid()}-{path.name}"))
            file, _ = textworld.make(options)
            # what is beside it first: the game's own file says that all is there
            Path(file).with_suffix(".json").rename(path.with_suffix(".json"))
            Path(file).rename(path)
        return path

    def shown(self, text: str) -> str:
        lines = "\n".join(line.strip() for line in text.splitlines() if line.strip())
        if not self.commands:
            return lines
        return f"{lines}\nYou may: {', '.join(self.state.admissible_commands or ())}"

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    @classmethod
    def rows(cls, count: int, seed: int, **args: Any) -> "list[dict[str, Any]]":
        return [
            {"prompt": "a game", "response": "", "seed": seed + number} for number in range(count)
        ]


def there(file: str) -> Path:
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no game {file}: install its data, or leave it out")
    return path
