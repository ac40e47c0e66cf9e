"""Many engines as one: each request goes to the engine with the fewest sequences in flight.

In: `GenerateRequest`s from workflows, engine actor handles by name. Out: `Completion`s. Invariant: a request runs on exactly
one engine; when its caller gives up (is cancelled), the engine is told to stop working on it.
"""

import asyncio
from typing import Any

from rft.experience import Completion, GenerateRequest, decode, encode
from rft.rollout.engine import EngineDied


class EnginePool:
    def __init__(self, engines: dict[str, Any]):
        if not engines:
            raise ValueError("an engine pool needs at least one engine")
        self.engines = dict(engines)
        self.load = dict.fromkeys(self.engines, 0)  # sequences in flight
        self._where: dict[str, str] = {}  # request id -> engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """n completions; raises EngineDied naming the engine when its process ended, RuntimeError when it refuses."""
        from ray.exceptions import RayActorError

        name = min(self.load, key=self.load.__getitem__)
        self.load[name] += request.n
        self._where[request.request_id] = name
        try:
            return decode(await self.engines[name].generate.remote(encode(request)), list[Completion])
        except RayActorError as error:
            raise EngineDied(f"{name} died while it served {request.request_id}") from error
        except asyncio.CancelledError:
            self.engines[name].abort.remote(request.request_id)
            raise
        finally:
            self.load[name] -= request.n
            del self._where[request.request_id]

    async def abort(self, request_id: str) -> None:
        """Stop a running request; its `generate` returns what there is, with stop "abort". Unknown ids are finished ones."""
        name = self._where.get(request_id)
        if name is not None:
            await self.engines[name].abort.remote(request_id)
