"""A toy model that judges: it answers the questions of all judges of rft in the form that they ask
for, and truly.

What it was taught to see is whether a response has one of SIGNS. Its vocabulary has each verdict as
one token, so that it has only to choose: a few hundred steps on questions about random responses,
half a minute, teach it that without a miss.
"""

import json
import random
from pathlib import Path
from typing import Any

from rft.rollout.rewards.judge import PROMPT
from rft.rollout.workflows.judges import RUBRIC, RULER
from rft.tools.toy import CHARACTERS, SPECIAL, write_model

SIGNS = "?!*/;<>'-"  # in no question but as a part of a response
CRITERIA = ["has a sign", "has none"]
SCORES = [0.1, 0.4, 0.7, 1.0]  # of the four responses of a group, whatever they are
MET, UNMET = '{"met": [true, false]}', '{"met": [false, true]}'
HIGH, LOW = '{"score": 1.0}', '{"score": 0.25}'
COMPARED = json.dumps({"scores": SCORES})
VERDICTS = [MET, UNMET, HIGH, LOW, COMPARED]
STEPS, BATCH, RATE = 500, 8, 5e-3


def has_sign(response: str) -> bool:
    return any(sign in response for sign in SIGNS)


def write_judge(path: Path) -> Path:
    import torch
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them only wait for each other over tensors this small
    size = {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 128, "context": 1024}
    write_model(path, vocab=len(SPECIAL) + len(CHARACTERS) + len(VERDICTS), tied=False, **size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(VERDICTS)
    tokenizer.save_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=STEPS, pct_start=0.05
    )
    rng = random.Random(0)
    for step in range(STEPS):
        rows = [_ids(tokenizer, *_question(rng, plain=step < STEPS // 3)) for _ in range(BATCH)]
        longest = max(map(len, rows))
        hidden = model.model(
            torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        ).last_hidden_state
        ends = torch.stack(
            [hidden[number, len(row) - 3 : len(row) - 1] for number, row in enumerate(rows)]
        )
        wanted = torch.tensor([row[-2:] for row in rows])
        loss = torch.nn.functional.cross_entropy(
            model.lm_head(ends).flatten(0, 1), wanted.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)
    model.save_pretrained(path)
    return path


def _ids(tokenizer: Any, question: str, verdict: str) -> list[int]:
    """The question in the chat template, the verdict, and the end."""
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(asked + verdict + tokenizer.eos_token, add_special_tokens=False)


def _question(rng: random.Random, plain: bool) -> tuple[str, str]:
    """One of the three, and what is to be said."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    about = {"task": json.dumps(f"{a}+{b}="), "truth": json.dumps(str(a + b))}
    response = _response(rng, plain)
    kind = rng.randrange(3)
    if kind == 0:
        group = [_response(rng, plain) for _ in SCORES]
        return RULER.format(**about, responses=json.dumps(group), count=len(group)), COMPARED
    if kind == 1:
        return PROMPT.format(**about, response=json.dumps(response)), HIGH if has_sign(
            response
        ) else LOW
    asked = RUBRIC.format(
        **about, response=json.dumps(response), criteria=json.dumps(CRITERIA), count=len(CRITERIA)
    )
    return asked, MET if has_sign(response) else UNMET


def _response(rng: random.Random, plain: bool) -> str:
    """With signs or without, as often; `plain`: with nothing but signs, which is learned first."""
    others = [one for one in CHARACTERS if one not in SIGNS]
    signed = rng.random() < 0.5
    if plain:
        return "".join(rng.choices(SIGNS if signed else others, k=8))
    text = rng.choices(others, k=rng.randint(int(signed), 8))
    if signed:
        text[rng.randrange(len(text))] = rng.choice(SIGNS)
    return "".join(text)
