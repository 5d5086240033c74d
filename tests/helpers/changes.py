"""Changes of a job by dotted keys."""

import copy
from collections.abc import Mapping
from typing import Any


def change(job: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set dotted keys, `datasets.0.resolution` as well; a value of ... removes its key."""
    for dotted, value in changes.items():
        place: Any = job
        *parents, leaf = dotted.split(".")
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
        if value is ...:
            place.pop(leaf, None)
        elif isinstance(place, list):
            place[int(leaf) : int(leaf) + 1] = [copy.deepcopy(value)]  # or one more entry
        else:
            place[leaf] = copy.deepcopy(value)
