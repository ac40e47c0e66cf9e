"""Which adapter a request runs with, in an engine that keeps the base model and gets the policy as
adapters.

    install(v) ──► room? ──► workers: drop what nobody uses, register v under a new number
            ──► new requests name v
    request    ──► takes the newest version, keeps it to its end, and gives it back

In: orders to install a version, requests as they begin and end. Out: orders for the workers
(`rft.sync.lora`), vLLM's LoRARequest and the version of every token. Nothing pauses: a
request in flight goes on with the adapter that it began with, whatever is installed meanwhile, so
all its tokens are of one version and its key-value cache is never stale. Invariants: an adapter is
dropped only when no request holds it; a number, and the name that vLLM's prefix cache is keyed by,
is given to one installation only, also when a version comes again after a resume with other
weights.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft.config import ModelConfig
from rft.config.layout import lora_of
from rft.ground.adapters import Lora, adapter_names
from rft.ground.experience import VersionSpan
from rft.ground.names import Dims, architecture_of, read_hf_config
from rft.ground.rounds import AdapterOrder, Installed

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# in vLLM
FUSED = {
    "q_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "o_proj": "o_proj",
    "down_proj": "down_proj",
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates
Ask = Callable[[AdapterOrder], Awaitable[Installed]]


@dataclass(frozen=True)
class ServedAdapter:
    version: int
    number: int  # vLLM's lora_int_id

    def request(self) -> "LoRARequest":
        """vLLM loads a path only for a number that it does not know; this one never is one."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(
            f"version {self.version}, adapter {self.number}", self.number, "in memory"
        )

    def spans(self, tokens: int) -> list[VersionSpan]:
        return [VersionSpan(version=self.version, start=0, end=tokens)] if tokens else []


class AdapterServing:
    """`kept`: adapters that the workers hold at most: the newest,
    and older ones with requests in flight.
    """

    def __init__(self, engine: str, model: ModelConfig, kept: int):
        self.engine = engine
        self.kept = kept
        hf = read_hf_config(model.model_path)
        found = lora_of(model.lora_configs, Dims.of(hf))
        assert found is not None and kept >= 2, (
            "adapters are served where the policy has one, the next beside the last"
        )
        self.lora: Lora = found
        # what the trainer's streams must have
        self.tensors = adapter_names(Dims.of(hf), architecture_of(hf), found)
        self.current: ServedAdapter | None = None  # None: the base model
        self._numbers = 0
        # by the workers, or by some of them after a failed round
        self._held: set[ServedAdapter] = set()
        self._users: Counter[ServedAdapter] = Counter()
        self._ended = asyncio.Event()

    def arguments(self) -> dict[str, Any]:
        """For vLLM's engine:

        LoRA in the trained layers only, so that no other layer pays for it.
        """
        targets = [FUSED[part] for part in self.lora.projections if part in FUSED]
        rank = next(size for size in RANKS if size >= self.lora.rank)
        slots = {"max_loras": self.kept, "max_cpu_loras": self.kept}
        return {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": targets, **slots}

    @contextmanager
    def use(self) -> Iterator[ServedAdapter | None]:
        """For the life of one request: the newest adapter, which stays until then."""
        served = self.current
        if served is None:  # before the first version
            yield None
            return
        self._users[served] += 1
        try:
            yield served
        finally:
            self._users[served] -= 1
            self._ended.set()

    async def install(self, version: int, ask: Ask, timeout: float) -> Installed:
        """Make `version` what new requests run with. Not called twice at a time.

        `ask` sends the order to every worker and gives a report when all have followed; what it
        raises is raised here, and the version before is served on. `timeout`: for requests of old
        versions to end, where they take every place.
        """
        await self._room(version, timeout)
        drop = [served for served in self._held if self._is_free(served)]
        self._numbers += 1
        coming = ServedAdapter(version, self._numbers)
        self._held.add(coming)
        report = await ask(self._order(coming, drop))
        self._held -= set(drop)
        for served in drop:
            del self._users[served]
        self.current = coming
        return report

    def _order(self, coming: ServedAdapter, drop: list[ServedAdapter]) -> AdapterOrder:
        return AdapterOrder(
            number=coming.number,
            drop=sorted(served.number for served in drop),
            rank=self.lora.rank,
            alpha=self.lora.alpha,
            projections=list(self.lora.projections),
        )

    def _is_free(self, served: ServedAdapter) -> bool:
        return served != self.current and not self._users[served]

    def _busy(self) -> list[ServedAdapter]:
        return sorted(
            (s for s in self._held if not self._is_free(s)), key=lambda served: served.number
        )

    async def _room(self, version: int, timeout: float) -> None:
        """Wait until the workers have a place for one more."""
        try:
            async with asyncio.timeout(timeout):
                while len(self._busy()) >= self.kept:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            users = ", ".join(
                f"{self._users[s]} of version {s.version}" for s in self._busy() if self._users[s]
            )
            raise TimeoutError(
                f"{self.engine} holds {self.kept} adapters and found no place for version "
                f"{version} in {timeout:g} s: "
                f"requests still run, {users}"
            ) from None
