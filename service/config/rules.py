"""What the configuration lets jobs ask for."""

from collections.abc import Iterable, Mapping

from service.config.schema import Config
from service.conversations.job_parser import JobRules


def adapters_of(config: Config) -> dict[str, str]:
    """Return the names of LoRA adapters, each with the model that it stands on."""
    return {adapter: name for name, model in config.models.items() for adapter in model.adapters}


def rules_of(config: Config, adapters: Mapping[str, str] | None = None, elsewhere: Iterable[str] = ()) -> JobRules:
    """Return the rules of a configuration; ``elsewhere`` are models of other nodes on the same store.

    ``adapters`` are the names of adapters, each with the model that it stands on; None is those of the configuration.
    """
    return JobRules(
        models=tuple(dict.fromkeys((*config.models, *elsewhere))),
        adapters=adapters_of(config) if adapters is None else adapters,
        limits=config.limits,
        webhook_hosts=tuple(config.webhooks.hosts),
        webhook_secrets=tuple(config.webhooks.secrets),
        key_s=config.store.keep_keys_s,
    )
