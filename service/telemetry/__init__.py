"""What operators measure: metrics, logs and traces, made of facts that the service tells anyway."""
