"""Which of vLLM's layers a round has to load again: those whose tensors have changed.

    a whole load ──watched──► tensor ──► layers that take it
    names that changed ──chosen──► layers, and all names that these take

A layer is loaded whole or not at all: its loaders, and what packs it after, want all of its
tensors. Invariants: nothing is chosen before it was seen which layer takes what; where that could
not be told tensor by tensor, never; a tensor that is loaded goes to chosen layers only.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

LOOKS = 2 * 10**6  # at a layer after a tensor, in one load: a second of a pause, and once


class Chosen(NamedTuple):
    layers: torch.nn.ModuleList
    names: frozenset[str]
    late: frozenset[torch.nn.Module]  # of these layers: whole only when the load is finished


class LayersOf:
    """Of one model in vLLM. What is known stays true: a model's layers never change."""

    def __init__(self, model: torch.nn.Module):
        self.layers = [one for one in model.modules() if dict(one.named_parameters(recurse=False))]
        self._takers: dict[str, list[torch.nn.Module]] = {}
        self._late: frozenset[torch.nn.Module] = frozenset()
        self.is_known = False

    def watched(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, for an open reload of all layers; looks after each which of them took it."""
        takers: dict[str, list[torch.nn.Module]] = {}
        looks, waiting = 0, {layer: self._state(layer) for layer in self.layers}
        for name, tensor in tensors:
            yield name, tensor
            takers[name] = [one for one, state in waiting.items() if self._state(one) != state]
            waiting |= {one: self._state(one) for one in takers[name]}
            if (looks := looks + len(waiting)) > LOOKS:
                yield from tensors
                return
        self._takers = takers
        self._late = frozenset(one for one in self.layers if get_layerwise_info(one).can_load())
        self.is_known = bool(takers) and all(takers.values())

    def chosen(self, changed: Collection[str]) -> Chosen | None:
        """What to load for these; None: everything."""
        if not self.is_known or not self._takers.keys() >= set(changed):
            return None
        names, layers = set(changed), set()
        while True:
            layers |= {layer for name in names for layer in self._takers[name]}
            more = {name for name, takers in self._takers.items() if layers & set(takers)}
            if more == names:
                break
            names |= more
        if len(names) == len(self._takers):
            return None
        found = [layer for layer in self.layers if layer in layers]
        late = self._late & layers
        return Chosen(torch.nn.ModuleList(found), frozenset(names), frozenset(late))

    @staticmethod
    def _state(layer: torch.nn.Module) -> tuple[bool, int | None]:
        info = get_layerwise_info(layer)
        return info.can_load(), info.load_numel


def check_whole(chosen: Chosen) -> None:
    """Raises where a layer did not get all that it got when it was watched."""
    for layer in chosen.layers:
        if get_layerwise_info(layer).can_load() and layer not in chosen.late:
            raise RuntimeError(
                f"{type(layer).__name__} took fewer tensors than before of {len(chosen.names)}"
            )
