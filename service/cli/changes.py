"""What has changed between two looks at a service, a line each: what a person follows in a pipe."""

from typing import Final

from service.cli.plain import plain
from service.cli.status_table import Document

PLACE: Final = "id"


def changes(before: Document, now: Document) -> list[str]:
    """Return the changes of workers, lanes, tool servers and the store, in the order of the document."""
    lines = []
    earlier = {worker[PLACE]: worker for worker in before["workers"]}
    for worker in now["workers"]:
        lines += _worker(earlier.get(worker[PLACE]), worker)
    lanes = {lane["lane"]: lane["resident"] for lane in before["lanes"]}
    for lane in now["lanes"]:
        if lanes.get(lane["lane"], lane["resident"]) != lane["resident"]:
            lines.append(f"{lane['lane']}: {', '.join(lane['resident']) or 'empty'}")
    troubles = {(each["model"], each["name"]): each["trouble"] for each in before["tool_servers"]}
    for server in now["tool_servers"]:
        if troubles.get((server["model"], server["name"])) != server["trouble"]:
            told = server["trouble"] if server["trouble"] is not None else "is back"
            lines.append(f"the MCP server {server['name']} of {server['model']}: {told}")
    if before["store"]["trouble"] != now["store"]["trouble"]:
        lines.append(f"the store: {now['store']['trouble'] or 'is well again'}")
    return [plain(line).replace("\n", " ") for line in lines]


def _worker(before: Document | None, now: Document) -> list[str]:
    if before is None:
        return [f"{now[PLACE]}: {now['state']}: {now['because']}"]
    if before["state"] != now["state"]:
        return [f"{now[PLACE]}: {before['state']} -> {now['state']}: {now['because']}"]
    if before["incarnation"] != now["incarnation"]:  # what happened in between was too quick to be seen
        return [f"{now[PLACE]}: engine {now['incarnation']} in place of {before['incarnation']}: {now['because']}"]
    return []
