"""Whether what engines said is what the weights of its versions say: every token, by a full computation of transformers.

In: answers with versions. Out: counts, or an assertion. A token of mixed weights, of cached keys of old weights, or without a
version is found here; that other versions' weights would be found out is checked as well.
"""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import torch
from fault_client import TEMPERATURE, TOKENS, answers
from fault_ranks import weights
from miniature import END, TOLERANCE, answer, ask
from safetensors.torch import save_file

from rft.experience import Completion

CONTRAST = 100 * TOLERANCE  # by how much another version's log-probabilities differ, somewhere in an answer
LOAD_S = 120.0
SWEEP = TOKENS + 10  # tokens: longer than all others that it may meet
CHECKED = [([30, 31, 70, 71, 12, 13, 14], 7), ([44] * 40 + [45], 8), ([15 + i % 50 for i in range(120)], 9)]


class Judge:
    def __init__(self, path: Path, clean: Path):
        self.path, self.clean = path, clean
        clean.mkdir()
        self.read: Counter[Path] = Counter()  # answers of a file that were judged
        self.model = functools.lru_cache(maxsize=6)(self._model)

    def traffic(self, file: Path) -> Counter[str]:
        """All that a client got since the last time. Counts answers, tokens and answers over a change of weights."""
        seen: Counter[str] = Counter()
        fresh = answers(file)[self.read[file] :]
        self.read[file] += len(fresh)
        for answered in fresh:
            for made in answered.completions:
                self._judge(answered.prompt, made)
                seen["answers"] += 1
                seen["tokens"] += len(made.tokens)
                seen["over a change"] += len(made.versions) > 1
        return seen

    def compare_with_clean(self, engines: list[Any], version: int) -> None:
        """Bit by bit what the same engines say when they have loaded the version from a directory."""
        for last in [ask(engine, max_tokens=SWEEP, min_tokens=SWEEP) for engine in engines]:
            answer(last)  # what was under way before, also for a client that is gone, has ended
        streamed = self._say(engines)
        save_file(weights(self.path, version), self.clean / "model.safetensors")
        ray.get([engine.load_weights_from.remote(str(self.clean), version) for engine in engines], timeout=LOAD_S)
        assert streamed == self._say(engines), f"version {version} is not what it is after a clean load"

    def _say(self, engines: list[Any]) -> list[list[Completion]]:
        """One request at a time."""
        made = []
        for prompt, seed in CHECKED:
            asked = [ask(engine, prompt=prompt, max_tokens=16, min_tokens=16, seed=seed) for engine in engines]
            made += [answer(one) for one in asked]
        return made

    def _judge(self, prompt: list[int], made: Completion) -> None:
        at = 0
        for span in made.versions:
            assert span.start == at < span.end, made.versions
            at = span.end
        assert at == len(made.tokens) == len(made.logprobs), "tokens without version"
        for span in made.versions:
            worst = self._difference(span.version, prompt, made)[span.start : span.end].max()
            assert worst < TOLERANCE, f"{made.versions}: of version {span.version} log-probabilities differ by {worst}"
        if at > TOKENS // 2 and len(made.versions) == 1:
            other = self._difference(made.versions[0].version - 1, prompt, made).max()
            assert other > CONTRAST, "this judge cannot tell versions apart"

    def _difference(self, version: int, prompt: list[int], made: Completion) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(version)(torch.tensor([prompt + made.tokens])).logits[0, len(prompt) - 1 : -1]
        logits[:, END] = -torch.inf  # min_tokens
        ours = (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
        return (torch.tensor(made.logprobs) - ours).abs()

    def _model(self, version: int) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        left = model.load_state_dict(weights(self.path, version), strict=False)
        assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])  # the head is the embedding
        return model
