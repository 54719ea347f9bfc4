"""YAML by the rules of its version 1.2 where PyYAML's differ: ``yes`` and ``no`` are words, and a date is text."""

import re
from typing import Final

import yaml

_BOOLEAN: Final = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_REPLACED: Final = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")


class WordsLoader(yaml.SafeLoader):
    """A safe loader of YAML whose words stay words."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way to say it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


WordsLoader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
