"""Why an engine did not serve a request, as everybody who asks one understands it: ask another.

Raised by engines and by the pool, caught by the pool and the explorer. Loads nothing.
"""


class EngineUnavailable(RuntimeError):
    """The engine serves nothing now: it holds mixed weights, is being ended, or is gone. The message names it and says why."""


class EngineDied(EngineUnavailable):
    """The engine's processes or its actor are gone; the message names the engine and the cause."""
