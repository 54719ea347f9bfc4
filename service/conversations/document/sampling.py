"""Groups of a posted document: one conversation becomes several alike ones, before anything else. Pure."""

from collections.abc import Mapping
from typing import Any

from service.conversations.document.limits import Limits, too_many
from service.conversations.document.reading import refuse
from service.conversations.document.spec import JobSpec


def has_groups(spec: JobSpec) -> bool:
    """Whether a document asks for samples of conversations."""
    # A list, since ``any`` would make a call for each of ten thousand.
    return spec.group is not None or bool([each for each in spec.conversations if each.group is not None])


def spread_groups(document: Mapping[str, Any], spec: JobSpec, limits: Limits) -> dict[str, Any]:
    """Return a document with a conversation for each sample, as ``ID.0`` and so on; ``spec`` is its form.

    Raises:
        InvalidJob: these would be too many conversations.
    """
    counts = [(each.group or spec.group) for each in spec.conversations]
    total = sum(1 if group is None else group.samples for group in counts)
    refuse(too_many("group.samples", "conversations", total, limits.conversations))
    spread: list[dict[str, Any]] = []
    for index, (given, parsed, group) in enumerate(
        zip(document["conversations"], spec.conversations, counts, strict=True)
    ):
        plain = {name: value for name, value in given.items() if name != "group"}
        if group is None or parsed.sample is not None:
            spread.append(plain)
            continue
        name = f"c{index}" if parsed.id is None else parsed.id
        for number in range(group.samples):
            sample = {"group": name, "number": number, "of": group.samples}
            spread.append({**plain, "id": f"{name}.{number}", "sample": sample})
    return {**{name: value for name, value in document.items() if name != "group"}, "conversations": spread}
