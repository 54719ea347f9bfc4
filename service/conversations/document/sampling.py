"""Groups of a posted document: one conversation becomes several alike ones, before anything else. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from service.conversations.document.limits import Limits, too_many
from service.conversations.document.reading import refuse
from service.conversations.document.spec import GroupSpec, JobSpec
from service.errors import Fault


def has_groups(spec: JobSpec) -> bool:
    """Whether a document asks for samples of conversations."""
    # A list, since ``any`` would make a call for each of ten thousand.
    return spec.group is not None or bool([each for each in spec.conversations if each.group is not None])


def spread_groups(document: Mapping[str, Any], spec: JobSpec, limits: Limits) -> tuple[dict[str, Any], bytes]:
    """Return a document with a conversation for each sample, as ``ID.0`` and so on, and its JSON; ``spec`` is its form.

    Raises:
        InvalidJob: there would be too many conversations, or they would be too large.
    """
    counts = [0 if each.sample is not None else _samples_of(each.group or spec.group) for each in spec.conversations]
    total = sum(max(1, count) for count in counts)
    refuse(too_many("group.samples", "conversations", total, limits.conversations))
    posted = list(zip(document["conversations"], spec.conversations, counts, strict=True))
    size = sum(len(msgspec.json.encode(given)) * max(1, count) for given, _, count in posted)
    if size > limits.body_bytes:
        message = f"its conversations would have {size} bytes, more than limits.body_bytes = {limits.body_bytes}"
        refuse([Fault(path="group.samples", message=message)])
    spread: list[dict[str, Any]] = []
    for index, (given, parsed, count) in enumerate(posted):
        plain = {name: value for name, value in given.items() if name != "group"}
        if not count:
            spread.append(plain)
            continue
        name = f"c{index}" if parsed.id is None else parsed.id
        for number in range(count):
            sample = {"group": name, "number": number, "of": count}
            spread.append({**plain, "id": f"{name}.{number}", "sample": sample})
    made = {**{name: value for name, value in document.items() if name != "group"}, "conversations": spread}
    return made, msgspec.json.encode(made)


def _samples_of(group: GroupSpec | None) -> int:
    return 0 if group is None else group.samples
