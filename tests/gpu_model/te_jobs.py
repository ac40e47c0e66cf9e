"""What ranks with the stand-in for Transformer Engine do that others do not."""

from typing import Any

from jobs import policy_on


def layers(path: str, **layout: Any) -> dict[str, Any]:
    """What the start line says of the layers, and the classes in the model, with their bases."""
    with policy_on(path, **layout) as policy:
        modules = [module for part in policy.model for module in part.modules()]
        classes = {base.__name__ for module in modules for base in type(module).__mro__}
        return {"describe": policy.describe(), "classes": classes}
