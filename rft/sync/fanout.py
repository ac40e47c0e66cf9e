"""Who takes which stream from whom, so that every byte leaves the trainer once. Pure.

    engines that are here, by shape ──settle──► a ring of names for each shape, under a generation
    (ring, stream) ──► head: the engine that takes it from the trainer rank
                   ──► upstream of every other one: the engine before it in the ring

Engines of one shape have as many tensor-parallel workers, and worker t of each needs the same part
of every stream; so workers t pass it on among themselves, and no trainer rank is in a group that
carries bytes of another rank. Streams are dealt over the ring: of R streams and E engines each
engine takes R / E from trainer ranks, and every link into an engine carries the model's bytes once.

A ring never changes: when an engine comes, goes, gives up, or is lost to another one, there is a
new generation, and who connects from then on follows that. Invariants: within a generation every
stream's way is a chain that begins at the trainer and meets each engine once; an engine that is in
no ring takes everything from the trainer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rft.ground.rounds import GroupSeat, WorkerOffer

Shape = tuple[int, int, str]  # tensor-parallel workers, key/value heads; kind of links
Ring = tuple[str, ...]


def head(stream: int, size: int) -> int:
    """The place in a ring of so many of the engine that takes this stream from the trainer."""
    return stream % size


def comes_from_trainer(stream: int, place: int, size: int) -> bool:
    """Whether the engine at `place` takes `stream` from the trainer; if not, from the place before
    it.
    """
    return place == head(stream, size)


def before(place: int, size: int) -> int:
    return (place - 1) % size


def shape_of(offers: Sequence[WorkerOffer]) -> Shape | None:
    """Of an engine; None where it cannot be in a ring."""
    shapes = {(*offer.shape, offer.kind) for offer in offers}
    return shapes.pop() if len(shapes) == 1 else None


@dataclass
class Rings:
    """The rings of all shapes. `generation` grows with every change of any."""

    generation: int = 0
    shapes: dict[str, Shape] = field(default_factory=dict)  # of the engines here, as they came
    rings: dict[Shape, Ring] = field(default_factory=dict)

    def join(self, name: str, shape: Shape | None) -> None:
        """It is in a ring from the next `settle` on. Without a shape it never is."""
        self.leave(name)
        if shape is not None:
            self.shapes[name] = shape

    def leave(self, name: str) -> None:
        self.drop(name)
        self.shapes.pop(name, None)

    def drop(self, name: str) -> None:
        """It takes no part until the next `settle`: the others go on without it."""
        rings = self._without(name)
        self.generation += rings != self.rings
        self.rings = rings

    def fail(self, generation: int, lost: str) -> None:
        """An engine of `generation` did not get what it was to get: nobody waits for it any more.
        If it `lost` another one, the others go on without that until the next `settle`. Nothing
        where this is known, or was meant of other rings.
        """
        if generation != self.generation:
            return
        self.generation += 1
        if self.ring_of(lost) is not None:
            self.rings = self._without(lost)

    def pass_over(self, generation: int) -> None:
        """Engines have been in rings of `generation`, of which nothing is known here: none of these
        comes again.
        """
        self.generation = max(self.generation, generation)

    def settle(self, taking: Collection[str]) -> bool:
        """A round begins, of these engines: whether they are in other rings than before."""
        rings: dict[Shape, Ring] = {}
        for name, shape in self.shapes.items():
            if name in taking:
                rings[shape] = (*rings.get(shape, ()), name)
        changed, self.rings = rings != self.rings, rings
        self.generation += changed
        return changed

    def ring_of(self, name: str) -> Ring | None:
        """None where it takes everything from the trainer."""
        shape = self.shapes.get(name)
        ring = self.rings.get(shape, ()) if shape is not None else ()
        return ring if name in ring else None

    def seats(self, name: str, offers: Mapping[str, Sequence[WorkerOffer]]) -> list[GroupSeat]:
        """Of the workers of engine `name`; none where it is in no ring. `offers`: of every engine's
        workers.
        """
        if (ring := self.ring_of(name)) is None:
            return []
        place = ring.index(name)
        return [
            GroupSeat(
                generation=self.generation,
                names=list(ring),
                mine=place,
                before=previous.endpoint,
                leader=leader.endpoint,
            )
            for previous, leader in zip(
                offers[ring[before(place, len(ring))]], offers[ring[0]], strict=True
            )
        ]

    def _without(self, name: str) -> dict[Shape, Ring]:
        return {
            shape: tuple(other for other in ring if other != name)
            for shape, ring in self.rings.items()
        }
