"""Metrics, logs and traces for operators, made from facts that the service reports anyway."""
