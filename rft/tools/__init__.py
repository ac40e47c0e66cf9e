"""The tools behind the words of the `rft` command, a module each with a `main(argv)`.

The table is what `rft --help` prints, what `rft` runs and what shells complete; importing it loads
none of them.
"""

WORDS = "[experiment=NAME | --config FILE] [section.key=value ...]"
COMMANDS = {  # title: word: (module of rft.tools, what follows the word, what it does)
    "begin": {
        "init": ("init", "DIR", "write a config, a reward with its test, and a launch script"),
        "train": ("", WORDS, "run; the same command again goes on from the newest checkpoint"),
        "doctor": ("doctor", "[the words of rft train]", "would it run on this machine?"),
        "plan": ("planner", "[--cards h100:64] [...]", "does it fit, in which layout?"),
        "config": ("config", "[--all] [the words of rft train]", "the config that they mean"),
        "studio": ("studio", "[--port N]", "put a config together in the browser"),
        "workflows": ("workflows", "[NAME]", "what each workflow and reward does and takes"),
        "debug": ("debug", "[--row N] experiment=NAME ...", "one task, every token of it"),
    },
    "look at a run": {
        "report": ("report", "RUN_DIR", "one page about it, also while it is under way"),
        "view": ("view", "JOB_DIR | FILE.jsonl", "its experiences in the browser, by token"),
        "chat": ("chat", "RUN", "talk to the model that it exported"),
        "trace": ("timeline", "RUN_DIR", "its timeline, for Perfetto"),
        "sweep-report": ("sweep_report", "SWEEP_DIR", "table and picture of a sweep"),
    },
    "work on a run": {
        "ckpt": ("ckpt", "ls | show | verify | diff | tag | export ...", "its checkpoints"),
        "engines": ("engines", "RUN_DIR [--add N | --remove NAME]", "its engines, as it runs"),
        "buffer": ("buffer", "dump RUN_DIR -o FILE.jsonl", "its experiences as a file"),
        "environment": ("environment", "check | rows NAME", "try an environment by hand"),
    },
    "this command": {
        "completion": ("completion", "bash | zsh", "what a shell completes `rft` with"),
    },
}
