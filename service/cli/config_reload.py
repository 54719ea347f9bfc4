"""The command that has a running service read its configuration anew."""

from rich.table import Table

from roundhouse_client.drivers.exchange import DEFAULT_URL
from service.cli.remote import JsonOption, KeyOption, UrlOption, connect, print_document

SHOWN = ("changed", "added", "removed", "resized", "restarted", "unchanged")


def reload(url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, *, as_json: JsonOption = False) -> None:
    """Have the service read its configuration anew; what is refused or not usable changes nothing."""
    with connect(url, api_key) as service:
        answer = service.reload_configuration()
    listing = Table("what", "settings and models", box=None)
    for what in SHOWN:
        if names := getattr(answer, what):
            listing.add_row(what, ", ".join(names))
    print_document(answer.document, listing, as_json=as_json)
