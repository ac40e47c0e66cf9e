"""One process in the place of a mesh: what the ranks of a trainer do together, where there is only
one of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft.data.packing import Packed


class Alone:
    """As `rft.megatron.mesh.Mesh`, as far as the loop and its parts ask."""

    rank = tp_rank = cp_rank = 0
    world = dp = tp = cp = 1
    is_last_stage = True

    def broadcast(self, item: Any) -> Any:
        return item

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def scatter_parts(self, parts: "list[list[Packed]] | None") -> "list[Packed]":
        assert parts is not None and len(parts) == 1
        return parts[0]

    def reduce(self, sums: Any, maxima: Any) -> None:
        """They are whole already."""

    def barrier(self, name: str) -> None:
        """Nobody else is waited for."""

    def close(self) -> None:
        """Nothing is held."""
