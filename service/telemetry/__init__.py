"""Metrics, logs and traces for operators, made of facts that the service tells anyway."""
