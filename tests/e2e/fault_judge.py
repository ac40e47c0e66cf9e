"""Whether what engines said is what the weights of its versions say: every token, by a full
computation of transformers.

In: answers with versions. Out: counts, or an assertion. A token of mixed weights, of cached keys of
old weights, or without a version is found here; that other versions' weights would be found out is
checked as well.
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

from rft.ground.experience import Completion

# by how much another version's log-probabilities differ, somewhere in an answer
CONTRAST = 100 * TOLERANCE
LOAD_S = 120.0
BATCH = 16
SWEEP = TOKENS + 10  # tokens: longer than all others that it may meet
CHECKED = [
    ([30, 31, 70, 71, 12, 13, 14], 7),
    ([44] * 40 + [45], 8),
    ([15 + i % 50 for i in range(120)], 9),
]


class Judge:
    def __init__(self, path: Path, clean: Path):
        self.path, self.clean = path, clean
        clean.mkdir()
        self.read: Counter[Path] = Counter()  # answers of a file that were judged
        self.model = functools.lru_cache(maxsize=6)(self._model)

    def traffic(self, file: Path) -> Counter[str]:
        """All that a client got since the last time.

        Counts answers, tokens and answers over a change of weights.
        """
        fresh = answers(file)[self.read[file] :]
        self.read[file] += len(fresh)
        pairs = [(answered.prompt, made) for answered in fresh for made in answered.completions]
        for _, made in pairs:
            check_spans(made)
        versions = sorted({span.version for _, made in pairs for span in made.versions})
        assert 0 not in versions, "an engine answered from the weights that it was started with"
        for version in versions:
            said = [
                pair for pair in pairs if any(span.version == version for span in pair[1].versions)
            ]
            for at in range(0, len(said), BATCH):
                self._judge(version, said[at : at + BATCH])
        return Counter(
            {
                "answers": len(pairs),
                "tokens": sum(len(made.tokens) for _, made in pairs),
                "over a change": sum(len(made.versions) > 1 for _, made in pairs),
            }
        )

    def compare_with_clean(self, engines: list[Any], version: int) -> None:
        """Bit by bit what the same engines say when they have
        loaded the version from a directory.
        """
        for last in [ask(engine, max_tokens=SWEEP, min_tokens=SWEEP) for engine in engines]:
            answer(last)  # what was under way before, also for a client that is gone, has ended
        streamed = self._say(engines)
        save_file(weights(self.path, version), self.clean / "model.safetensors")
        ray.get(
            [engine.load_weights_from.remote(str(self.clean), version) for engine in engines],
            timeout=LOAD_S,
        )
        assert streamed == self._say(engines), (
            f"version {version} is not what it is after a clean load"
        )

    def _say(self, engines: list[Any]) -> list[list[Completion]]:
        """One request at a time."""
        made = []
        for prompt, seed in CHECKED:
            asked = [
                ask(engine, prompt=prompt, max_tokens=16, min_tokens=16, seed=seed)
                for engine in engines
            ]
            made += [answer(one) for one in asked]
        return made

    def _judge(self, version: int, said: list[tuple[list[int], Completion]]) -> None:
        """The tokens that were sampled under `version`, in answers that have some."""
        right, wrong = self._logprobs(version, said), self._logprobs(version - 1, said)
        for (_, made), ours, others in zip(said, right, wrong, strict=True):
            theirs = torch.tensor(made.logprobs)
            for span in (span for span in made.versions if span.version == version):
                worst = (theirs - ours)[span.start : span.end].abs().max()
                assert worst < TOLERANCE, f"{made.versions}: those of {version} differ by {worst}"
                if span.end - span.start > TOKENS // 2:
                    contrast = (theirs - others)[span.start : span.end].abs().max()
                    assert contrast > CONTRAST, "this judge cannot tell versions apart"

    def _logprobs(
        self, version: int, said: list[tuple[list[int], Completion]]
    ) -> list[torch.Tensor]:
        """Of every token of each answer, under one version for all."""
        rows = [torch.tensor(prompt + made.ids) for prompt, made in said]
        with torch.no_grad():
            # on the right: nobody looks there
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            logits = self.model(version)(padded).logits
        logits[:, :, END] = -torch.inf  # min_tokens
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        found = []
        for (prompt, made), row in zip(said, logprobs, strict=True):
            at = slice(len(prompt) - 1, len(prompt) - 1 + len(made.tokens))
            found.append(
                row[at].gather(1, torch.tensor(made.tokens, dtype=torch.int64)[:, None])[:, 0]
            )
        return found

    def _model(self, version: int) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        left = model.load_state_dict(weights(self.path, version), strict=False)
        # the head is the embedding
        assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])
        return model


def check_spans(made: Completion) -> None:
    """Every token has one version, and they only grow."""
    assert sorted({span.version for span in made.versions}) == [
        span.version for span in made.versions
    ]
    at = 0
    for span in made.versions:
        assert span.start == at < span.end, made.versions
        at = span.end
    assert at == len(made.tokens) == len(made.logprobs), "tokens without version"
